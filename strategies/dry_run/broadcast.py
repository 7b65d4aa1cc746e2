"""Broadcasts values and random states from rank 0 of a group."""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from boltmesh.strategies.random_state import capture_random_state, restore_random_state

T = TypeVar("T")


def broadcast_from_rank0(value: T, group: ProcessGroup | None = None) -> T:
    """Return the first rank's value on every rank. Collective over the group.

    Args:
        value: Small and picklable; only that of the first rank is used.
        group: The ranks that get it; None: all ranks of the job.
    """
    holder = [value]
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(holder, source, group=group)
    return holder[0]


def share_random_state(group: ProcessGroup, device: torch.device) -> None:
    """Set the generators of all ranks of a group to the state of the first one's.

    Loaders, samplers and collate functions draw from them, and every rank has its own copy of
    these. No effect if all ranks were seeded equally. Collective over the group.
    """
    state = capture_random_state(device) if group.rank() == 0 else None
    state = broadcast_from_rank0(state, group)
    if group.rank() != 0 and state is not None:
        restore_random_state(state, device)
