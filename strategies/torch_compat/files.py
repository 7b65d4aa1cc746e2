"""What torch reads from disks: batches, and pieces of checkpoints."""

from typing import Any

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter


def skip_indices(iterator: Any, count: int) -> bool:
    """Move a single-process iterator over a map-style dataset forward without loading anything.

    Returns:
        False when this iterator cannot be moved that way and its batches have to be loaded.
    """
    if not isinstance(iterator, _SingleProcessDataLoaderIter):
        return False
    if isinstance(iterator._dataset, IterableDataset):
        return False
    for _ in range(count):
        iterator._next_index()  # type: ignore[no-untyped-call]
    iterator._num_yielded += count
    return True


def storage_info(file_name: str, offset: int, length: int) -> Any:
    """Where a piece of a sharded checkpoint lies, as torch's own reader wants to be told."""
    return _StorageInfo(file_name, offset, length)


def without_duplicates(plans: list[SavePlan]) -> list[SavePlan]:
    """Let one rank of those that have a piece of a tensor write it."""
    return dedup_save_plans(plans)


def storage_class(storage: Any) -> type:
    """The class that a file of ``torch.save`` names for a tensor's storage."""
    if isinstance(storage, torch.TypedStorage):
        name = storage._pickle_storage_type()  # type: ignore[no-untyped-call]
        found: type = getattr(torch, name)
        return found
    return type(storage)
