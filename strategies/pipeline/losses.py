"""What a loss was averaged over, so that the losses of microbatches add up to the batch's.

The mean of means is not the mean where microbatches hold different numbers of rows, or of tokens
that count. Autograd knows what was divided by what: the graph behind a loss is read from its end
down to the reductions that made it a scalar. A mean over n is worth n; sums are added as they are.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node
from typing_extensions import override

from boltmesh.errors import ConfigError

_LINEAR = {
    "AddBackward0", "CatBackward0", "CloneBackward0", "ExpandBackward0", "MulBackward1",
    "NegBackward0", "ReshapeAliasBackward0", "SelectBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "StackBackward0", "SubBackward0", "ToCopyBackward0", "UnsqueezeBackward0",
    "ViewBackward0",
}  # fmt: skip
"""Behind these a loss is still a sum of its parts, each times a number."""

_MEAN, _SUM = 1, 2
"""torch's numbers of reductions, as its kernels save them."""


@dataclass(frozen=True)
class Reduction:
    """How one part of a loss became a scalar."""

    kind: Literal["mean", "sum"]
    count: Tensor | float
    """Elements that a mean was taken over; of ``cross_entropy`` those that it did not ignore, each
    with the weight of its class. 0-dim, on the loss's device, or a number. 1 for a sum."""
    size: float
    """How many elements there were, those that do not count included; at least 1."""
    operator: str
    """torch's name of it, for messages."""


def reductions(loss: Tensor) -> list[Reduction]:
    """Return the reductions that a scalar loss consists of.

    Terms that no reduction over data made (a penalty on weights) are left out.
    """
    found: list[Reduction] = []
    pending: list[tuple[Node | None, float | Tensor | None]] = [(loss.grad_fn, None)]
    while pending:
        node, divisor = pending.pop()
        if node is None:
            continue
        name = node.name()
        reduction = _reduction(node, name, divisor)
        if reduction is not None:
            found.append(reduction)
        elif name in _LINEAR or _is_sum_of_scalars(node, name):
            pending.extend((each, divisor) for each, _ in node.next_functions)
        elif name in {"DivBackward0", "DivBackward1", "MulBackward0"}:
            pending.extend(_behind_product(node, name, divisor))
    return found[::-1]


def _behind_product(
    node: Node, name: str, divisor: float | Tensor | None
) -> Iterator[tuple[Node | None, float | Tensor | None]]:
    other = getattr(node, "_saved_other", None)
    is_division = name.startswith("Div")
    for position, (each, _) in enumerate(node.next_functions):
        if is_division and position == 0 and _is_scalar(other):
            yield each, other
        elif not is_division or position == 0:
            yield each, divisor


def _reduction(node: Node, name: str, divisor: float | Tensor | None) -> Reduction | None:
    if name in {"NllLossBackward0", "NllLoss2DBackward0"}:
        weight: Tensor = _saved(node, "total_weight")
        if _saved(node, "reduction") == _MEAN:
            return Reduction("mean", weight, _saved(node, "target").numel(), name)
        return _divided(divisor, tuple(_saved(node, "target").shape), name)
    if name == "MeanBackward0":
        return _mean(_saved(node, "self_sym_numel"), name)
    if name == "MeanBackward1":
        return _partial_mean(node, name)
    if name == "SumBackward0" and not _is_sum_of_scalars(node, name):
        inner = node.next_functions[0][0]
        if inner is not None and inner.name() == "MeanBackward1":
            over_rows = _partial_mean(inner, "MeanBackward1")
            if over_rows is not None:
                return over_rows
        return _divided(divisor, _saved(node, "self_sym_sizes"), name)
    kept = getattr(node, "_saved_reduction", None)
    if kept == _MEAN:
        return _mean(_saved(node, "self").numel(), name)
    if kept == _SUM:
        return _divided(divisor, tuple(_saved(node, "self").shape), name)
    return None


def _partial_mean(node: Node, name: str) -> Reduction | None:
    """A mean over some dimensions: of the rows, if the first dimension is among them."""
    sizes = _saved(node, "self_sym_sizes")
    dims = [_signed(dim) % len(sizes) for dim in _saved(node, "dim")] or list(range(len(sizes)))
    if 0 not in dims:
        return None
    return _mean(math.prod(sizes[dim] for dim in dims), name)


def _mean(count: float, name: str) -> Reduction:
    return Reduction("mean", float(count), max(float(count), 1.0), name)


def _divided(divisor: float | Tensor | None, sizes: Sequence[int], name: str) -> Reduction:
    """A sum, which may have been divided by what it was summed over."""
    if divisor is None:
        return Reduction("sum", 1.0, 1.0, name)
    if isinstance(divisor, Tensor) and not _is_number(divisor):
        size = float(max(math.prod(sizes), 1))
        return Reduction("mean", divisor, size, name)  # counted from data: a mask's sum
    value = float(divisor)
    leading = {math.prod(sizes[: end + 1]) for end in range(len(sizes))}
    if value in leading:
        return _mean(value, name)
    return Reduction("sum", 1.0, 1.0, name)


def _is_sum_of_scalars(node: Node, name: str) -> bool:
    if name not in {"SumBackward0", "SumBackward1"}:
        return False
    inner = node.next_functions[0][0]
    return inner is not None and inner.name() in {"StackBackward0", "CatBackward0"}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def _is_number(value: Tensor) -> bool:
    """Whether a saved operand was a number of Python's rather than a tensor of somebody's.

    Both are saved as 0-dim tensors; numbers give way to any tensor's type.
    """
    narrow = torch.int8 if not value.is_floating_point() else torch.float16
    return torch.result_type(torch.zeros((), dtype=narrow), value) != value.dtype


def _signed(number: int) -> int:
    """Autograd shows saved integers without their sign."""
    return number - 2**64 if number >= 2**63 else number


def _saved(node: Node, name: str) -> Any:
    return getattr(node, f"_saved_{name}")


class StepWeights:
    """Weighs the microbatches of a step, one after the other, while the total is not known yet.

    Each loss is scaled by what it counts, relative to the size of the step's first microbatch, so
    that backward passes may begin at once; what was accumulated is divided by ``total`` in the
    end. Made anew for each step.
    """

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        """What the weights add up to so far: the step's gradients and losses are divided by it."""
        self._kind: str | None = None
        self._first: list[Reduction] = []

    def weigh(self, loss: Tensor, rows: int) -> tuple[Tensor, Tensor | float]:
        """Return a microbatch's loss scaled by its weight, and the weight.

        Args:
            loss: Scalar, with its graph.
            rows: Of the microbatch; what a loss without any reduction over data is worth.

        Raises:
            ConfigError: When the loss has parts that count different things, which no one number
                can weigh.
        """
        found = reductions(loss) or [_mean(rows, "rows")]
        kinds = {each.kind for each in found}
        if len(kinds) > 1 or self._kind not in {None, *kinds}:
            raise ConfigError(
                "training_step adds a mean and a sum over the batch, so its loss depends on how "
                "the batch is cut into microbatches. Divide the sum by the number of its rows, or "
                "use microbatches=1."
            )
        (self._kind,) = kinds
        if self._kind == "sum":
            self.total = 1.0
            return loss, 1.0
        self._first = self._first or found
        weight = found[0].count / self._first[0].size
        self._refuse_uneven(found, weight)
        self.total = self.total + weight
        return _scaled(loss, weight, found[0]), weight

    def _refuse_uneven(self, found: list[Reduction], weight: Tensor | float) -> None:
        if len(found) == 1 and len(self._first) == 1:
            return
        size = self._first[0].size
        same = len(found) == len(self._first) and all(
            math.isclose(
                float(each.count) * float(self._first[0].count),
                float(weight) * size * float(first.count),
                rel_tol=1e-6,
            )
            for each, first in zip(found, self._first, strict=True)
        )
        if not same:
            parts = ", ".join(
                f"{each.operator.removesuffix('Backward0')} over {float(each.count):g}"
                for each in found
            )
            raise ConfigError(
                f"training_step adds means over different things ({parts}), which microbatches "
                f"hold in different proportions, so no weight makes their losses the batch's. "
                f"Use microbatches=1, or take both means over the same elements."
            )


def _scaled(loss: Tensor, weight: Tensor | float, reduction: Reduction) -> Tensor:
    """Scale; a mean over nothing is not a number, and worth nothing."""
    if not isinstance(weight, Tensor):
        return loss * weight
    if reduction.operator.startswith("NllLoss"):  # whose backward pass divides no zero by zero
        return _Weighed.apply(loss, weight)  # type: ignore[no-any-return, no-untyped-call]
    return loss * weight if bool(weight != 0) else torch.zeros_like(loss)


class _Weighed(torch.autograd.Function):
    """``loss * weight``, and 0 where the weight is, without asking a device for it."""

    @staticmethod
    @override
    def forward(ctx: Any, loss: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.where(weight == 0, torch.zeros_like(loss), loss * weight)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradients[0] * weight, None
