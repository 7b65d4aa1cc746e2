"""The private names of torch that the strategies need, each with why, in one place."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
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


def flush_static_graph(module: DistributedDataParallel) -> None:
    """Launch the all-reduces that DDP postpones in the first iteration of a static graph.

    DDP queues this flush on the autograd engine in its forward pass. Under manual optimisation
    gradients are prepared outside of that forward pass, so nobody would launch them.
    """
    module.reducer._delay_all_reduce()  # type: ignore[attr-defined]


def device_index(device: torch.device) -> list[int] | None:
    """What DDP and ``barrier`` call ``device_ids``: an accelerator's index, None on the CPU."""
    return None if device.type == "cpu" or device.index is None else [device.index]
