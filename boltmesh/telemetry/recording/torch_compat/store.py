"""The store by which ranks have met."""

import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d


def default_store(prefix: str, *, may_grow: bool = False) -> _c10d.PrefixStore | None:
    """Return the store by which the ranks of this job have met; None where there is none.

    None also for a store that never forgets: a file would grow with every key that is set anew.
    It is to be asked for each time, for a store that is kept keeps its server's port.

    Args:
        prefix: Of all keys.
        may_grow: A file will do: few keys are set, and rarely.
    """
    if not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    base = store
    while isinstance(base, _c10d.PrefixStore):
        base = base.underlying_store
    if not (may_grow or isinstance(base, (_c10d.TCPStore, _c10d.HashStore))):
        return None
    return _c10d.PrefixStore(prefix, store)
