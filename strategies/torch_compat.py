"""The private names of torch that the strategies need, each with why, in one place."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter


def skip_indices(iterator: Any, count: int) -> bool:
    """Move a single-process iterator over a map-style dataset forward without loading anything.

    Returns:
        False when this iterator cannot be moved that way and its batches have to be loaded.
    """
    if not isinstance(iterator, _SingleProcessDataLoaderIter) or not hasattr(
        iterator._dataset, "__getitem__"
    ):
        return False
    for _ in range(count):
        iterator._next_index()
    iterator._num_yielded += count
    return True


def is_loader_iterator(iterator: object) -> bool:
    """Whether a ``DataLoader`` made this iterator."""
    return isinstance(iterator, _BaseDataLoaderIter)


def flush_static_graph(module: DistributedDataParallel) -> None:
    """Launch the all-reduces that DDP postpones in the first iteration of a static graph.

    DDP queues this flush on the autograd engine in its forward pass. Under manual optimisation
    gradients are prepared outside of that forward pass, so nobody would launch them.
    """
    module.reducer._delay_all_reduce()


def can_use_static_graph(module: DistributedDataParallel) -> bool:
    """Whether DDP has seen the same graph in every iteration so far."""
    if module.static_graph:
        return False
    data: dict[str, Any] = module._get_ddp_logging_data()
    return bool(data.get("can_set_static_graph"))


def bucket_sizes_bytes(module: DistributedDataParallel) -> list[int]:
    """The sizes of DDP's gradient buckets, as rebuilt after its first iteration."""
    data: dict[str, Any] = module._get_ddp_logging_data()
    text = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
    return [int(part) for part in text.split(",") if part.strip()]


def device_index(device: torch.device) -> list[int] | None:
    """What DDP and ``barrier`` call ``device_ids``: the index of an accelerator, None on the CPU."""
    return None if device.type == "cpu" or device.index is None else [device.index]
