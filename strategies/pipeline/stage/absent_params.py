"""Parameters of other stages: in their places, of their shapes, without their memory."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import Module, Parameter

from boltmesh.errors import ConfigError


class AbsentError(ConfigError):
    """A step asks for values that another rank holds. Not every rank of the pipeline raises it."""


def refuse_calls_outside(units: Mapping[str, Module]) -> None:
    """Let units whose values another rank has raise where no step calls them.

    Within a step another function stands in the place of their ``forward``.

    Args:
        units: By name.

    Raises:
        AbsentError: When one is called, in a hook of the user's say.
    """
    for name, unit in units.items():
        if any(map(is_absent, unit.parameters())):
            unit.register_forward_pre_hook(partial(_refuse_call, name))


def _refuse_call(name: str, module: Module, _: Any) -> None:
    if "forward" not in vars(module) and any(map(is_absent, module.parameters())):
        raise AbsentError(
            f"{name!r} is called outside of the steps that a pipeline runs, and another rank has "
            f"its parameters: it would give NaN. Call it in validation_step, test_step or "
            f"predict_step, or on all ranks within gathered_parameters(module)."
        )


def explain_write(error: BaseException) -> None:
    """Say what to do where torch refuses to write to a parameter that another rank has."""
    text = str(error)
    if isinstance(error, RuntimeError) and _WRITTEN in text and _SAYS not in text:
        advice = (
            f"A parameter that another rank of the pipeline has was written to, in a hook or a "
            f"step. Write to it on all ranks inside of "
            f"boltmesh.strategies.gathered_parameters(module, writes=True), or use a strategy "
            f"without a pipeline. {_SAYS} {text}"
        )
        error.args = (advice,)


_WRITTEN = "more than one element of the written-to tensor refers to a single memory location"
_SAYS = "torch says:"


def make_absent(parameters: Iterable[Parameter], device: torch.device | None = None) -> None:
    """Free the memory of parameters that another stage holds.

    They stay the same objects of the same shape and type, in their modules and in optimizers. All
    elements are one element in memory, NaN where the type has it: a use that nobody foresaw is seen
    in the loss, and an optimizer finds no gradient and leaves them alone.

    Args:
        parameters: They may be absent already.
        device: Where they are to seem to be, by default where they are. Moving them as torch does
            would give them the memory of all their elements.
    """
    for parameter in parameters:
        parameter.data = absent_like(parameter, device or parameter.device)
        parameter.grad = None


def absent_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same shape and type whose elements are one element in memory."""
    fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), fill, dtype=tensor.dtype, device=device).expand(tensor.shape)


def is_absent(parameter: torch.Tensor) -> bool:
    """Whether another stage holds the parameter, and this one only its shape."""
    if parameter.is_meta:  # nobody holds it yet
        return False
    if parameter.untyped_storage().nbytes() != parameter.element_size():
        return False
    return parameter.numel() > 1 or bool(parameter.isnan().all())
