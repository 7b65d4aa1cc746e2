"""A user's optimizer on small parameters of our own, to see what its step does.

The optimizer itself, its state and the random numbers of the run stay as they are.

Finds optimizers that need whole matrices, by looking at what they do to a small one.

Shampoo, SOAP and whatever makes updates orthogonal multiply a gradient with itself or factor it. On
shards torch would do that too, gathering as it goes, in another order and precision for each number
of ranks: the numbers would not be those of one process.

Finds optimizers whose step of one parameter depends on the gradients of others.

A rank of a pipeline has the gradients of its stages. Prodigy, D-Adaptation, or an Adam that clips
by a norm of its own would take those for all, and stages would step by different amounts.

Finds optimizers that step a rank's part of a parameter otherwise than they step the whole.

Muon and Shampoo want whole matrices, LARS and LAMB the norms of whole parameters, Adafactor rows
and columns, Prodigy all gradients at once: on parts each of them computes something else, and says
nothing. So an optimizer is tried on a few small parameters, whole and in parts.
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
    """Whether there is anything to try: torch's own are known.

    One that steps another one within cannot be tried without stepping that.
    """
    if type(optimizer).__module__.startswith("torch."):
        return False
    return not any(isinstance(each, Optimizer) for each in vars(optimizer).values())


def trial_step(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[Parameter]
) -> Callable[[], object]:
    """Return what steps other parameters as an optimizer would in its first steps.

    To be called where random numbers are forked; it raises what the optimizer's step does.

    Args:
        optimizer: As ``can_be_tried`` allows.
        group: Whose settings are taken, one of the optimizer's.
        parameters: Stepped by their ``grad``.
    """
    runner = object.__new__(type(optimizer))
    vars(runner).update(vars(optimizer))  # a copy by torch's rules has lost what is the class's own
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

    False where it cannot be tried: torch's own optimizers, which are known, one that steps another
    one within, and one that does not work on a small matrix.
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
    except Exception:  # noqa: BLE001 - it wants other parameters, which a real step will show
        return seen.is_any
    return seen.is_any


class _Products(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether a matrix was multiplied or factored."""

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
"""Estimates made of earlier gradients show in the second step or later."""


def joins_gradients(optimizer: Optimizer) -> bool:
    """Whether a parameter's step depends on another one's gradient, as tried on two small ones.

    False where it cannot be tried: one that steps another optimizer within, and one that does not
    work on a small matrix. Of torch's own only LBFGS does.
    """
    if isinstance(optimizer, LBFGS):
        return True
    if not can_be_tried(optimizer):
        return False
    return any(_is_joint_in(optimizer, group) for group in optimizer.param_groups)


def _is_joint_in(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    try:
        one, other = (_step_pair(optimizer, group, size) for size in (1.0, 1000.0))
    except Exception:  # noqa: BLE001 - it wants other parameters, which a real step will show
        return False
    return not torch.equal(one, other)


def _step_pair(optimizer: Optimizer, group: Mapping[str, Any], size: float) -> Tensor:
    """Return a parameter after some steps beside another one with gradients of a size."""
    first, second = (Parameter(torch.ones(_PAIR_SHAPE)) for _ in range(2))
    step = trial_step(optimizer, group, [first, second])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for those that draw
        for _ in range(_PAIR_STEPS):
            first.grad, second.grad = torch.ones(_PAIR_SHAPE), torch.full(_PAIR_SHAPE, size)
            step()
    return first.detach()


_SHAPES = ((4, 6), (6, 4), (8,))
_STEPS = 4
"""Estimates made of earlier gradients show in the second step or later."""

_RATE = 1e-2
_ROUNDING = 1e-9
"""Of steps in double precision, relative to the largest element."""


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that would do something else with parts of parameters.

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
