"""Finds optimizers that step a rank's part of a parameter otherwise than they step the whole.

Muon and Shampoo want whole matrices, LARS and LAMB the norms of whole parameters, Adafactor rows
and columns, Prodigy all gradients at once: on parts each of them computes something else, and says
nothing. So an optimizer is tried on a few small parameters, whole and in parts.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from boltmesh.errors import ConfigError
from boltmesh.strategies.torch_compat import step_without_hooks

_SHAPES = ((4, 6), (6, 4), (8,))
_STEPS = 4
"""Estimates made of earlier gradients show in the second step or later."""

_RATE = 1e-2
_ROUNDING = 1e-9
"""Of steps in double precision, relative to the largest element."""


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that would do something else with parts of parameters.

    Raises:
        ConfigError: Naming the optimizer.
    """
    for optimizer in optimizers:
        if not steps_parts_alike(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} steps a parameter by more than the elements that a "
                f"rank of a tensor group has of it: norms, rows or products of the whole, all "
                f"gradients at once, or random numbers. Use bolt_ddp, or an optimizer that works "
                f"on each element by itself, such as AdamW."
            )


def steps_parts_alike(optimizer: Optimizer) -> bool:
    """Whether steps of two halves are the halves of the step, as tried on small parameters.

    True, too, where it cannot be tried because the optimizer does not work on plain small matrices;
    a real step will show that. One that steps another within is judged by that one.
    """
    if isinstance(optimizer, LBFGS):
        return False
    inner = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    if inner:
        return all(map(steps_parts_alike, inner))
    return all(_alike_in(optimizer, group) for group in optimizer.param_groups)


def _alike_in(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    dims = {each.dim() for each in group["params"]}
    # Some take matrices alone, and some are given nothing else.
    shapes = [each for each in _SHAPES if len(each) > 1 or min(dims, default=1) < 2]
    try:
        whole = _stepped(optimizer, group, shapes, None)
        halves = [_stepped(optimizer, group, shapes, at) for at in range(2)]
    except Exception:  # noqa: BLE001 - it wants other parameters, which a real step will show
        return True
    return all(
        _is_near(torch.cat(parts, _dim(value.shape)), value)
        for value, *parts in zip(whole, *halves, strict=True)
    )


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Whether steps are alike, however small they are."""
    size = float(other.abs().nan_to_num().max())
    return torch.allclose(one, other, rtol=0, atol=_ROUNDING * size, equal_nan=True)


def _dim(shape: Sequence[int]) -> int:
    """Which dimension is halved: of one matrix the first, of another the second."""
    return 0 if len(shape) == 1 or shape[0] < shape[1] else 1


def _stepped(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    half: int | None,
) -> list[Tensor]:
    """Return how parameters have changed after some steps: whole ones, or one half of each."""
    runner = object.__new__(type(optimizer))
    vars(runner).update(copy.copy(vars(optimizer)))
    settings = {key: copy.deepcopy(each) for key, each in group.items() if key != "params"}
    if not settings.get("lr", 1):
        settings["lr"] = _RATE  # of a schedule that begins with nothing
    generator = torch.Generator().manual_seed(0)

    def part(value: Tensor, dim: int) -> Tensor:
        return value if half is None else value.chunk(2, dim)[half].contiguous()

    values = [torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes]
    dims = [_dim(each) for each in shapes]
    leaves = [Parameter(part(each, dim).clone()) for each, dim in zip(values, dims, strict=True)]
    runner.param_groups = [{**settings, "params": leaves}]
    runner.state = defaultdict(dict)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for those that draw
        for _ in range(_STEPS):
            for leaf, value, dim in zip(leaves, values, dims, strict=True):
                gradient = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                leaf.grad = part(gradient, dim)
            step_without_hooks(optimizer)(runner)
    return [
        leaf.detach() - part(value, dim)
        for leaf, value, dim in zip(leaves, values, dims, strict=True)
    ]
