"""The rendezvous store of a job: the one private name of torch below the telemetry."""

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore


def job_store(prefix: str, *, in_memory: bool = False) -> Store | None:
    """Return the store through which the ranks of this job have met; None if there is none.

    Call it for each use: a store that is kept keeps its server's port.

    Args:
        prefix: Of all keys.
        in_memory: Return None for a store that never forgets, such as a file, which grows with
            every write. For callers that write often.
    """
    if not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if in_memory and not isinstance(base, TCPStore | HashStore):
        return None
    return PrefixStore(prefix, store)
