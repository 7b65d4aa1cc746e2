"""Tries a user's optimizer on small parameters, to see how its step depends on gradients.

The optimizer itself, its state and the random states of the run do not change.

``multiplies_matrices`` (ZeRO) finds optimizers that need full matrices: Shampoo, SOAP and
orthogonalizing optimizers multiply a gradient with itself or factor it. On shards torch would
gather, in another order and precision for each number of ranks, so results would differ from one
process.

``joins_gradients`` (pipeline) finds optimizers whose step of one parameter depends on the gradients
of others: Prodigy, D-Adaptation, an Adam that clips by its own norm. A rank of a pipeline has only
the gradients of its stages, and stages would step by different amounts.

``steps_parts_alike`` (tensor axis) finds optimizers that step a part of a parameter differently
from the whole: Muon and Shampoo need full matrices, LARS and LAMB norms of full parameters,
Adafactor rows and columns. On parts each of them computes something else without an error.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.torch_compat.optimizers import step_without_hooks
from boltmesh.strategies.torch_compat.tensors import DispatchMode


def can_be_tried(optimizer: Optimizer) -> bool:
    """Whether the optimizer can be tried: torch's own are known and need no trial.

    An optimizer that steps another one inside cannot be tried without stepping that one.
    """
    if type(optimizer).__module__.startswith("torch."):
        return False
    return not any(isinstance(each, Optimizer) for each in vars(optimizer).values())


def trial_step(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[Parameter]
) -> Callable[[], object]:
    """Return an object that steps other parameters as an optimizer would in its first steps.

    Call it with random states forked; it raises the errors of the optimizer's step.

    Args:
        optimizer: One for which ``can_be_tried`` is true.
        group: One of the optimizer's groups, for its settings.
        parameters: Stepped by their ``grad``.
    """
    runner = object.__new__(type(optimizer))
    vars(runner).update(vars(optimizer))  # a copy by torch's rules loses attributes of the class
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    runner.param_groups = [{**settings, "params": list(parameters)}]
    runner.state = defaultdict(dict)
    return lambda: step_without_hooks(optimizer)(runner)


_MATRIX_SHAPE = (4, 6)
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "cholesky", "inverse", "matrix_exp"}
_FACTORS = ("linalg_", "_linalg_")
_NORMS = {"linalg_vector_norm"}


def multiplies_matrices(optimizer: Optimizer) -> bool:
    """Whether a step takes matrix products or factors.

    False if it cannot be tried: torch's own optimizers, which are known, one that steps another one
    inside, and one that does not work on a small matrix.
    """
    if not can_be_tried(optimizer):
        return False
    return any(_is_product_in(optimizer, group) for group in optimizer.param_groups)


def _is_product_in(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    if not any(each.dim() > 1 for each in group["params"]):
        return False
    leaf = Parameter(torch.ones(_MATRIX_SHAPE))
    leaf.grad = torch.eye(*_MATRIX_SHAPE)
    step = trial_step(optimizer, group, [leaf])
    seen = _Products()
    try:
        with torch.random.fork_rng(devices=[]), seen:
            step()
    except Exception:  # noqa: BLE001 - it needs other parameters, as a real step will show
        return seen.is_any
    return seen.is_any


class _Products(DispatchMode):  # type: ignore[no-untyped-call]
    """Records whether a matrix was multiplied or factored."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_any = False

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name: str = func.overloadpacket.__name__
        if name in _PRODUCTS or (name.startswith(_FACTORS) and name not in _NORMS):
            self.is_any = True
        result: Tensor = func(*args, **(kwargs or {}))
        return result


_PAIR_SHAPE = (4, 6)
_PAIR_STEPS = 4
"""Effects of estimates from earlier gradients show in the second step or later."""


def joins_gradients(optimizer: Optimizer) -> bool:
    """Whether a parameter's step depends on another one's gradient, tried on two small ones.

    False if it cannot be tried: an optimizer that steps another one inside, and one that does not
    work on a small matrix. Among torch's own only LBFGS does.
    """
    if isinstance(optimizer, LBFGS):
        return True
    if not can_be_tried(optimizer):
        return False
    return any(_is_joint_in(optimizer, group) for group in optimizer.param_groups)


def _is_joint_in(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    try:
        one, other = (_step_pair(optimizer, group, size) for size in (1.0, 1000.0))
    except Exception:  # noqa: BLE001 - it needs other parameters, as a real step will show
        return False
    return not torch.equal(one, other)


def _step_pair(optimizer: Optimizer, group: Mapping[str, Any], size: float) -> Tensor:
    """Return a parameter after some steps together with another one, with gradients of a size."""
    first, second = (Parameter(torch.ones(_PAIR_SHAPE)) for _ in range(2))
    step = trial_step(optimizer, group, [first, second])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some optimizers draw random numbers
        for _ in range(_PAIR_STEPS):
            first.grad, second.grad = torch.ones(_PAIR_SHAPE), torch.full(_PAIR_SHAPE, size)
            step()
    return first.detach()


_SHAPES = ((4, 6), (6, 4), (8,))
_STEPS = 4
"""Effects of estimates from earlier gradients show in the second step or later."""

_RATE = 1e-2
_ROUNDING = 1e-9
"""Tolerance of steps in double precision, relative to the largest element."""


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that step parts of parameters differently from the whole.

    Raises:
        UnsupportedError: Naming the optimizer.
    """
    for optimizer in optimizers:
        if not steps_parts_alike(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} steps a parameter by more than the elements that a "
                f"rank of a tensor group has of it: norms, rows or products of the whole, all "
                f"gradients at once, or random numbers. Use bolt_ddp, or an optimizer that works "
                f"on each element by itself, such as AdamW."
            )


def steps_parts_alike(optimizer: Optimizer) -> bool:
    """Whether steps of two halves are the halves of the step, tried on small parameters.

    Also true if it cannot be tried because the optimizer does not work on plain small matrices; a
    real step will show that. An optimizer that steps another one inside is judged by that one.
    """
    if isinstance(optimizer, LBFGS):
        return False
    inner = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    if inner:
        return all(map(steps_parts_alike, inner))
    return all(_alike_in(optimizer, group) for group in optimizer.param_groups)


def _alike_in(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    dims = {each.dim() for each in group["params"]}
    # Some optimizers accept only matrices.
    shapes = [each for each in _SHAPES if len(each) > 1 or min(dims, default=1) < 2]
    try:
        whole = _stepped(optimizer, group, shapes, None)
        halves = [_stepped(optimizer, group, shapes, at) for at in range(2)]
    except Exception:  # noqa: BLE001 - it needs other parameters, as a real step will show
        return True
    return all(
        _is_near(torch.cat(parts, _dim(value.shape)), value)
        for value, *parts in zip(whole, *halves, strict=True)
    )


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Whether steps agree, relative to their size."""
    size = float(other.abs().nan_to_num().max())
    return torch.allclose(one, other, rtol=0, atol=_ROUNDING * size, equal_nan=True)


def _dim(shape: Sequence[int]) -> int:
    """Dimension that is halved: the first of one matrix, the second of another."""
    return 0 if len(shape) == 1 or shape[0] < shape[1] else 1


def _stepped(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    half: int | None,
) -> list[Tensor]:
    """Return the change of parameters after some steps: whole ones, or one half of each."""
    runner = object.__new__(type(optimizer))
    vars(runner).update(copy.copy(vars(optimizer)))
    settings = {key: copy.deepcopy(each) for key, each in group.items() if key != "params"}
    if not settings.get("lr", 1):
        settings["lr"] = _RATE  # a schedule may begin with 0
    generator = torch.Generator().manual_seed(0)

    def part(value: Tensor, dim: int) -> Tensor:
        return value if half is None else value.chunk(2, dim)[half].contiguous()

    values = [torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes]
    dims = [_dim(each) for each in shapes]
    leaves = [Parameter(part(each, dim).clone()) for each, dim in zip(values, dims, strict=True)]
    runner.param_groups = [{**settings, "params": leaves}]
    runner.state = defaultdict(dict)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some optimizers draw random numbers
        for _ in range(_STEPS):
            for leaf, value, dim in zip(leaves, values, dims, strict=True):
                gradient = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                leaf.grad = part(gradient, dim)
            step_without_hooks(optimizer)(runner)
    return [
        leaf.detach() - part(value, dim)
        for leaf, value, dim in zip(leaves, values, dims, strict=True)
    ]
