"""Private names of torch below the telemetry: the job's store, and completed calls of NCCL."""

import json

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore


def job_store(prefix: str, *, in_memory: bool = False) -> Store | None:
    """Return the store by which the ranks of this job rendezvous; None if there is none.

    Call it for each use: a store that is kept keeps its server's port.

    Args:
        prefix: Prefix of all keys.
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


FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""How many of NCCL's newest calls torch keeps, its new and its old name."""


def completed_on_gpus() -> dict[str, bool]:
    """Return whether NCCL has completed the newest call of each group, by the group's name.

    Read from torch's flight recorder, which looks at events that NCCL records in any case. Empty
    without NCCL, and where the recorder is off.
    """
    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return {}
    # The oldest come first. The last row of messages that are posted together has their state.
    entries = json.loads(dump(True, False)).get("entries", [])
    return {each["process_group"][0]: each["state"] == "completed" for each in entries}
