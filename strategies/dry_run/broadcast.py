"""What has to be the same on all ranks that share a model, and is therefore the first one's."""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from boltmesh.strategies.random_state import capture_random_state, restore_random_state

T = TypeVar("T")


def broadcast_from_rank0(value: T, group: ProcessGroup | None = None) -> T:
    """Return what the first rank of a group gives. Collective over the group.

    Args:
        value: Small, and such that it can be pickled; of the first rank alone it counts.
        group: The ranks that are to have it; None: all of the job.
    """
    holder = [value]
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(holder, source, group=group)
    return holder[0]


def share_random_state(group: ProcessGroup, device: torch.device) -> None:
    """Let the generators of all ranks of a group go on from where the first one's stand.

    Loaders, samplers and collators draw from them, and every rank has its own copy of these.
    Nothing changes where all were seeded alike. Collective over the group.
    """
    state = capture_random_state(device) if group.rank() == 0 else None
    state = broadcast_from_rank0(state, group)
    if group.rank() != 0 and state is not None:
        restore_random_state(state, device)
