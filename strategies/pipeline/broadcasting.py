"""Broadcasts of tensors of any type, and of a whole model's state over the ranks that hold it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def broadcast(tensor: Tensor, rank: int, group: ProcessGroup) -> None:
    """Put a rank's value into the tensors of all. Collective over ``group``.

    Args:
        tensor: Of the same shape and type on all ranks, on the group's device. Types that a backend
            does not know (bool, float8) pass as bytes.
        rank: Within the group.
        group: Of at least one rank.
    """
    if group.size() == 1 or not tensor.numel():
        return
    value = tensor.detach().contiguous()
    source = dist.get_global_rank(group, rank)
    dist.broadcast(value.reshape(-1).view(torch.uint8), source, group=group)
    if value.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(value)


def gathered(
    state: Mapping[str, Any],
    holder: Callable[[str], int],
    group: ProcessGroup,
    device: torch.device,
    *,
    keeps: bool,
) -> dict[str, Any]:
    """Return a state that every rank has parts of, whole and on the CPU. Collective over ``group``.

    Args:
        state: Of a module, with the same names on all ranks, and of tensors the same shapes.
        holder: The rank within ``group`` that has what a name stands for.
        group: Of ranks that together have everything.
        device: That the group communicates from.
        keeps: Whether this rank wants it; else it gets an empty one.
    """
    whole: dict[str, Any] = {}
    for name, value in state.items():
        source = holder(name)
        if isinstance(value, Tensor):
            if group.rank() == source:
                passed = value.detach().to(device).contiguous()
            else:
                passed = torch.empty(value.shape, dtype=value.dtype, device=device)
            broadcast(passed, source, group)
            told: list[Any] = [passed.cpu() if keeps else None]
        else:
            told = [value]
            dist.broadcast_object_list(told, dist.get_global_rank(group, source), group=group)
        if keeps:
            whole[name] = told[0]
    return whole
