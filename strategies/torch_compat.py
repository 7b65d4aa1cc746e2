"""The private names of torch that the strategies need, each with why, in one place."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from typing_extensions import override


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


class Replica(DistributedDataParallel):
    """DDP on a group of its own that can be copied all the same.

    DDP refuses to be pickled or deep-copied with any but the default group, because a copy gets
    the default group. Where the group holds all ranks, that is the same.
    """

    @override
    def _check_default_group(self) -> None:
        if dist.get_world_size(self.process_group) != dist.get_world_size():
            super()._check_default_group()  # type: ignore[no-untyped-call]


def flush_static_graph(module: DistributedDataParallel) -> None:
    """Launch the all-reduces that DDP postpones in the first iteration of a static graph.

    DDP queues this flush on the autograd engine in its forward pass. Under manual optimisation
    gradients are prepared outside of that forward pass, so nobody would launch them.
    """
    module.reducer._delay_all_reduce()  # type: ignore[attr-defined]


def device_index(device: torch.device) -> list[int] | None:
    """What DDP and ``barrier`` call ``device_ids``: an accelerator's index, None on the CPU."""
    return None if device.type == "cpu" or device.index is None else [device.index]
