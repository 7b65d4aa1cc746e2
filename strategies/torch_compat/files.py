"""Private parts of torch's readers of files: batches, and pieces of checkpoints."""

from typing import Any

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter


def skip_indices(iterator: Any, count: int) -> bool:
    """Advance a single-process iterator over a map-style dataset without loading anything.

    Returns:
        False if this iterator cannot be advanced so, and its batches have to be loaded.
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
    """Return the place of a piece of a sharded checkpoint, as torch's own reader needs it."""
    return _StorageInfo(file_name, offset, length)


def without_duplicates(plans: list[SavePlan]) -> list[SavePlan]:
    """Assign each piece of a tensor that several ranks have to one of them for writing."""
    return dedup_save_plans(plans)


def storage_class(storage: Any) -> type:
    """Return the class that a file of ``torch.save`` names for a tensor's storage."""
    if isinstance(storage, torch.TypedStorage):
        name = storage._pickle_storage_type()  # type: ignore[no-untyped-call]
        named_class: type = getattr(torch, name)
        return named_class
    return type(storage)
