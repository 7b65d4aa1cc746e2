"""Parameters of other stages: in their places, of their shapes, without their memory."""

from collections.abc import Iterable

import torch
from torch.nn import Parameter

from boltmesh.strategies.torch_compat import storage_key


def make_absent(parameters: Iterable[Parameter]) -> None:
    """Free the memory of parameters that another stage holds.

    They stay the same objects of the same shape, type and device, in their modules and in
    optimizers. All elements are one element in memory, NaN where the type has it: a use that
    nobody foresaw is seen in the loss, and an optimizer finds no gradient and leaves them alone.
    """
    for parameter in parameters:
        fill = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
        one = torch.full((), fill, dtype=parameter.dtype, device=parameter.device)
        parameter.data = one.expand(parameter.shape)
        parameter.grad = None


def is_absent(parameter: torch.Tensor) -> bool:
    """Whether another stage holds the parameter, and this one only its shape."""
    if parameter.is_meta:  # nobody holds it yet
        return False
    if parameter.untyped_storage().nbytes() != parameter.element_size():
        return False
    return parameter.numel() > 1 or bool(parameter.isnan().all())


def held_bytes(parameters: Iterable[Parameter]) -> int:
    """Return the memory that parameters take on this rank, shared memory once."""
    sizes = {storage_key(each): each.untyped_storage().nbytes() for each in parameters}
    return sum(sizes.values())
