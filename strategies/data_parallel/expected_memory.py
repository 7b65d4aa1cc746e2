"""What a rank needs in memory for the parameters that it holds: whole ones, or its shards."""

from collections.abc import Collection, Iterable, Sequence, Set

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import SGD, Adam, Optimizer

from boltmesh.telemetry.snapshot import MemoryKind, MemoryPlace


def expected_held_memory(
    module: Module,
    optimizers: Sequence[Optimizer],
    held: Collection[Parameter] | None = None,
) -> list[MemoryKind]:
    """Return the bytes of parameters, gradients, optimizer state and buffers.

    Args:
        module: The model.
        optimizers: All of them.
        held: Which parameters this rank has, each with its gradient and state; None: all.

    Optimizer state is left out where an optimizer's class does not say how much it keeps. What
    ``DistributedDataParallel`` copies gradients into to send them is no part of it.
    """
    parameters = list(module.parameters() if held is None else held)
    kept = set(parameters)
    trained = [each for each in parameters if each.requires_grad]
    found = {
        "parameters": _by_place(parameters),
        "gradients": _by_place(trained),
        "buffers": _by_place(module.buffers()),
    }
    states = [_optimizer_state(each, kept) for each in optimizers]
    if all(state is not None for state in states):
        total: dict[MemoryPlace, int] = {}
        for state in states:
            for place, size in (state or {}).items():
                total[place] = total.get(place, 0) + size
        found["optimizer"] = total
    return [
        MemoryKind(kind, place, None, size)
        for kind, sizes in found.items()
        for place, size in sizes.items()
    ]


def _by_place(tensors: Iterable[Tensor]) -> dict[MemoryPlace, int]:
    """Return the bytes on the device and on the host; a tensor that occurs twice counts once."""
    sizes: dict[MemoryPlace, int] = {}
    seen: set[int] = set()
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            place = _place(tensor)
            sizes[place] = sizes.get(place, 0) + _held_bytes(tensor)
    return sizes


def _held_bytes(tensor: Tensor) -> int:
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.numel() * held.element_size()


def _place(tensor: Tensor) -> MemoryPlace:
    return "host" if tensor.device.type == "cpu" else "device"


def _optimizer_state(optimizer: Optimizer, held: Set[Parameter]) -> dict[MemoryPlace, int] | None:
    """Return the bytes that an optimizer keeps once it has stepped; None where nobody knows."""
    sizes: dict[MemoryPlace, int] = {}
    for group in optimizer.param_groups:
        copies = _num_copies(optimizer, group)
        if copies is None:
            return None
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter not in held:
                continue
            size = copies * _held_bytes(parameter)
            place = _place(parameter)
            sizes[place] = sizes.get(place, 0) + size
            if isinstance(optimizer, Adam):  # counts its steps in a scalar of each parameter
                is_beside = group.get("capturable") or group.get("fused")
                where = place if is_beside else "host"
                sizes[where] = sizes.get(where, 0) + _step_bytes(fused=bool(group.get("fused")))
    return sizes


def count_state_copies(optimizers: Iterable[Optimizer]) -> int | None:
    """Return how many tensors of a parameter's size each state has; None where that differs.

    None, too, for classes that do not say.
    """
    copies = {_num_copies(each, group) for each in optimizers for group in each.param_groups}
    return copies.pop() if len(copies) == 1 else None


def _step_bytes(*, fused: bool) -> int:
    is_double = torch.get_default_dtype() == torch.float64 and not fused
    return 8 if is_double else 4


def _num_copies(optimizer: Optimizer, group: dict[str, object]) -> int | None:
    """Return how many tensors of a parameter's size the state has.

    Classes of others may keep anything, also where they derive from these.
    """
    if type(optimizer) in {torch.optim.Adam, torch.optim.AdamW}:
        return 3 if group.get("amsgrad") else 2
    if type(optimizer) is SGD:
        return 1 if group.get("momentum") else 0
    return None
