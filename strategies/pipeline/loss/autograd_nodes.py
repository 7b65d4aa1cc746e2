"""Reads reductions, factors and masks from the nodes of an autograd graph."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from boltmesh.strategies.torch_compat.autograd import numel_of_output

_TRANSPARENT = {
    "AddBackward1", "AliasBackward0", "CloneBackward0", "ExpandBackward0", "NanToNumBackward0",
    "NegBackward0", "PermuteBackward0", "ReshapeAliasBackward0", "RsubBackward1",
    "SelectBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "SubBackward1",
    "SumOverRanksBackward", "TBackward0", "ToCopyBackward0", "TransposeBackward0",
    "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip
"""Operators that do not change how much their operand counts. Some exist for certain dtypes and
layouts only, so a form leaves them out."""

_SUMS = {"AddBackward0", "SubBackward0", "RsubBackward0", "StackBackward0", "CatBackward0"}
_PRODUCTS = {"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"}
_TOTALS = {"SumBackward0", "SumBackward1", "NansumBackward0"}
_DOT_PRODUCTS = {"DotBackward0", "VdotBackward0", "BmmBackward0", "MmBackward0", "MvBackward0"}
_NLL = {"NllLossBackward0", "NllLoss2DBackward0"}
_SELECTIONS = {"SortBackward0", "SortBackward1", "TopkBackward0"}
_MEAN, _SUM = 1, 2
"""torch's codes of reductions, as its kernels save them."""


@dataclass(frozen=True)
class Reduction:
    """A reduction of elements to one value."""

    count: Tensor | float
    """Divisor of the sum, shape ``()`` if a tensor; 1 for a sum."""
    size: float
    """Number of elements, including those that do not count."""
    is_mean: bool
    is_over_rows: bool = True
    """Whether the first dimension of data was reduced, as far as a node shows."""
    goes_on: bool = True
    """Whether reading continues: its operand may have been reduced or divided before."""
    empty: tuple[Tensor | bool, ...] = ()
    """Flags, set if there were no elements; shape ``()`` and bool if tensors."""


@dataclass(frozen=True)
class Factor:
    """The operand of a product or division that has no graph."""

    value: Any
    is_division: bool
    is_scalar: bool
    may_be_of_row: bool = False
    """Whether it may be the value of the only row: shape ``(1,)`` beside one other element."""

    @property
    def size(self) -> float:
        """Approximate divisor, at least 1; 1 if reading it would need a device synchronization."""
        number = _number(self.value)
        if not self.is_scalar or number is None or number == 0 or not math.isfinite(number):
            return 1.0
        return max(abs(number) if self.is_division else 1 / abs(number), 1.0)

    @property
    def is_number(self) -> bool:
        """Whether it was a Python number, as far as its dtype shows.

        Autograd saves numbers as 0-dim tensors whose dtype yields to any other in type promotion.
        """
        if not isinstance(self.value, Tensor):
            return True
        narrow = torch.float16 if self.value.is_floating_point() else torch.int8
        return torch.result_type(torch.zeros((), dtype=narrow), self.value) != self.value.dtype

    @property
    def divisor(self) -> float:
        """The divisor as a number. Synchronizes with its device."""
        return float(self.divide(1.0))

    @property
    def is_zero(self) -> bool:
        """Whether it multiplies its term by 0, as far as is known without synchronization."""
        return not self.is_division and _number(self.value) == 0

    @property
    def may_be_count(self) -> bool:
        """Whether it divides, or is a tensor. Users weight terms by numbers that multiply."""
        return self.is_division or not self.is_number

    def divide(self, count: Tensor | float) -> Tensor | float:
        """Return a count multiplied by this factor's divisor.

        Factors that are infinite, NaN or 0 leave the count unchanged, so that overflow stays
        visible.

        Args:
            count: A number, or a tensor of shape ``()``.

        Returns:
            The same; fp64 if the factor is on a device.
        """
        number = _number(self.value)
        if number is not None:
            # A term that is multiplied by 0 counts as much as before.
            if number == 0 or not math.isfinite(number):
                return count
            return count * abs(number) if self.is_division else count / abs(number)
        value: Tensor = self.value.detach().reshape(()).double().abs()
        value = value.nan_to_num(nan=1.0, posinf=1.0)
        if self.is_division:
            return count * value
        return torch.where(value == 0, torch.zeros_like(value), count / value)


def plain_name(node: Node) -> str:
    """Return the name of a node's operator."""
    name: str = node.name()
    head, _, _ = name.partition("Backward")
    return head or name


def is_transparent(node: Node) -> bool:
    """Whether a node does not change how much its operand counts."""
    return node.name() in _TRANSPARENT


def behind_transparent(node: Node | None) -> Node | None:
    """Return the first node from here on that is not transparent."""
    while node is not None and is_transparent(node):
        node = node.next_functions[0][0]
    return node


def is_none(loss: Tensor) -> bool:
    """Whether a step has nothing to learn: its loss, shape ``()``, has no graph or a factor 0."""
    node = behind_transparent(loss.grad_fn)
    factor = None if node is None else factor_of(node)
    return node is None or (factor is not None and factor.is_zero)


class SumOverRanksNode(Protocol):
    """Node of a sum over ranks, whose operand has this rank's positions of a sequence."""

    num_summed: int
    """Number of elements of all ranks."""
    on_all_ranks: Callable[[Sequence[Tensor | bool]], tuple[Tensor, ...]]
    """Takes flags of shape ``()``; returns for each whether all ranks set it. Collective."""


def sum_over_ranks(node: Node) -> SumOverRanksNode | None:
    """Return the node as a sum over ranks if it is one."""
    return cast("SumOverRanksNode", node) if node.name() == "SumOverRanksBackward" else None


def is_sum(node: Node) -> bool:
    """Whether a node adds, stacks or concatenates its operands."""
    return node.name() in _SUMS


def selection_of_rows(node: Node) -> Node | None:
    """Return the node that sorts or selects the top elements along the first dim, else None."""
    inner: Node | None = node
    while inner is not None and inner.name() == "SliceBackward0":
        inner = inner.next_functions[0][0]
    if inner is None or inner.name() not in _SELECTIONS:
        return None
    dims = {0, -len(_saved(inner, "self_sym_sizes"))}
    return inner if _signed(_saved(inner, "dim")) in dims else None


def operands(node: Node) -> tuple[int, ...]:
    """Return the indices of the operands that have a graph."""
    return tuple(index for index, (each, _) in enumerate(node.next_functions) if each is not None)


def reduction_of(node: Node) -> Reduction | None:
    """Return how a node reduces; None if it does not."""
    name = node.name()
    if name in _NLL:
        return _nll(node)
    if name == "MeanBackward0":
        count = float(_saved(node, "self_sym_numel"))
        return Reduction(count, count, True, not _is_of_scalars(node), empty=(count == 0,))
    if name == "MeanBackward1" or name in _TOTALS:
        return _over_dims(node, is_mean=name == "MeanBackward1")
    if name in _DOT_PRODUCTS:
        return Reduction(1.0, 1.0, False, goes_on=False, empty=_empty_factors(node))
    kept = getattr(node, "_saved_reduction", None)
    if kept in {_MEAN, _SUM}:
        size = float(_saved(node, "self").numel())
        is_mean = kept == _MEAN
        return Reduction(size if is_mean else 1.0, size, is_mean, True, False, (size == 0,))
    return None


def _over_dims(node: Node, *, is_mean: bool) -> Reduction:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:  # nansum, which keeps its operand
        sizes = tuple(_saved(node, "self").shape)
    given = getattr(node, "_saved_dim", None) or ()
    dims = {_signed(dim) % max(len(sizes), 1) for dim in given} or set(range(len(sizes)))
    size = float(math.prod(sizes[dim] for dim in dims))
    is_over_rows = 0 in dims and not _is_of_scalars(node)
    return Reduction(size if is_mean else 1.0, size, is_mean, is_over_rows, empty=(size == 0,))


def _is_of_scalars(node: Node) -> bool:
    """Whether it reduces stacked terms, or a scalar."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    inner = node.next_functions[0][0]
    is_stack = inner is not None and inner.name() in {"StackBackward0", "CatBackward0"}
    return is_stack or (sizes is not None and len(sizes) == 0)


def _nll(node: Node) -> Reduction | None:
    kind, target = _saved(node, "reduction"), _saved(node, "target")
    if kind == _MEAN:
        weight = _saved(node, "total_weight").double()
        return Reduction(weight, target.numel(), True, goes_on=False)
    if kind == _SUM:
        empty = _ignores_all(node)
        return Reduction(1.0, target.numel(), False, goes_on=False, empty=empty)
    return None


def _ignores_all(node: Node) -> tuple[Tensor | bool, ...]:
    target: Tensor = _saved(node, "target")
    ignored = _signed(int(_saved(node, "ignore_index")))
    return ((target == ignored).all(),)


def factor_of(node: Node) -> Factor | None:
    """Return the factor of a product or division; None for other nodes.

    If both operands have a graph, the factor is the second one.
    """
    name = node.name()
    if name not in _PRODUCTS:
        return None
    is_division = name.startswith("Div")
    branches = operands(node)
    # Autograd saves an operand for the gradient of the other one.
    which = "self" if branches == (1,) else "other"
    value = getattr(node, f"_saved_{which}", None)
    is_scalar = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    has_dims = is_scalar and isinstance(value, Tensor) and value.ndim > 0
    return Factor(value, is_division, is_scalar, has_dims and numel_of_output(node) == 1)


def masks_of(node: Node) -> tuple[Tensor | bool, ...]:
    """Return flags, shape ``()``, set if a node masks all of its operand; empty if no mask."""
    name = node.name()
    if name == "MaskedFillBackward0":
        return (_saved(node, "mask").all(),)
    if name == "WhereBackward0" and len(operands(node)) == 1:
        condition: Tensor = _saved(node, "condition")
        return (~condition.any(),) if operands(node) == (0,) else (condition.all(),)
    if name == "MulBackward0" and len(operands(node)) == 1:
        return _empty_factors(node)
    if name in _NLL:
        return _ignores_all(node)
    return ()


def _empty_factors(node: Node) -> tuple[Tensor | bool, ...]:
    saved = [
        getattr(node, f"_saved_{name}", None) for name in ("self", "other", "mat2", "tensor", "vec")
    ]
    return tuple(
        ~each.detach().bool().any() for each in saved if isinstance(each, Tensor) and each.ndim > 0
    )


def _number(value: Any) -> float | None:
    """Return a value that needs no device synchronization as a float, else None."""
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return float(value.detach())
    return None


def _signed(number: int) -> int:
    """Restore the sign of an integer that autograd shows as unsigned."""
    return number - 2**64 if number >= 2**63 else number


def _saved(node: Node, name: str) -> Any:
    return getattr(node, f"_saved_{name}")


def gradients_of(loss: Tensor, values: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients of a loss, each with its value's shape; None if it has none.

    The graph is kept.

    Args:
        loss: Scalar, with its graph.
        values: Tensors of any shape.
    """
    wanted = [each for each in values if each.requires_grad]
    if not wanted or not loss.requires_grad:
        return [None] * len(values)
    made = iter(torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
    return [next(made) if each.requires_grad else None for each in values]
