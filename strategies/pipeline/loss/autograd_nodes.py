"""What the nodes of autograd's graph tell about reductions, factors and masks."""

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
"""What is behind these is worth as much as what is before. Whether some of them are there depends
on dtypes and layouts, so they have no part in a form."""

_SUMS = {"AddBackward0", "SubBackward0", "RsubBackward0", "StackBackward0", "CatBackward0"}
_PRODUCTS = {"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"}
_TOTALS = {"SumBackward0", "SumBackward1", "NansumBackward0"}
_DOT_PRODUCTS = {"DotBackward0", "VdotBackward0", "BmmBackward0", "MmBackward0", "MvBackward0"}
_NLL = {"NllLossBackward0", "NllLoss2DBackward0"}
_SELECTIONS = {"SortBackward0", "SortBackward1", "TopkBackward0"}
_MEAN, _SUM = 1, 2
"""torch's numbers of reductions, as its kernels save them."""


@dataclass(frozen=True)
class Reduction:
    """How many became one."""

    count: Tensor | float
    """What was divided by; 1 of a sum."""
    size: float
    """How many elements there were, those that do not count included."""
    is_mean: bool
    is_over_rows: bool = True
    """Whether the first dimension of data was reduced, as far as a node tells."""
    goes_on: bool = True
    """Whether its operand may have been reduced or divided before."""
    empty: tuple[Tensor | bool, ...] = ()
    """Whether there was nothing."""


@dataclass(frozen=True)
class Factor:
    """The operand of a product that has no graph."""

    value: Any
    is_division: bool
    is_scalar: bool
    may_be_of_row: bool = False
    """Whether it may be that of the only row: ``(1,)`` beside what has one element as well."""

    @property
    def size(self) -> float:
        """About how much it divides by; 1 where that is not known without asking a device."""
        number = _number(self.value)
        if not self.is_scalar or number is None or number == 0 or not math.isfinite(number):
            return 1.0
        return max(abs(number) if self.is_division else 1 / abs(number), 1.0)

    @property
    def is_number(self) -> bool:
        """Whether it was a number of Python's, as far as its type tells.

        Numbers are saved as 0-dim tensors that give way to the type of any other.
        """
        if not isinstance(self.value, Tensor):
            return True
        narrow = torch.float16 if self.value.is_floating_point() else torch.int8
        return torch.result_type(torch.zeros((), dtype=narrow), self.value) != self.value.dtype

    @property
    def divisor(self) -> float:
        """What it divides by; asks a device where it is on one."""
        return float(self.divide(1.0))

    @property
    def is_zero(self) -> bool:
        """Whether it switches its term off, as far as that is known without asking a device."""
        return not self.is_division and _number(self.value) == 0

    @property
    def may_be_count(self) -> bool:
        """Whether it divides, or is a tensor: weights that authors give to terms are neither."""
        return self.is_division or not self.is_number

    def divide(self, count: Tensor | float) -> Tensor | float:
        """Return a count with this factor in it.

        What is infinite or no number is no count: what overflows is to be seen to.
        """
        number = _number(self.value)
        if number is not None:
            # A term that is switched off is worth as much as before.
            if number == 0 or not math.isfinite(number):
                return count
            return count * abs(number) if self.is_division else count / abs(number)
        value: Tensor = self.value.detach().reshape(()).double().abs()
        value = value.nan_to_num(nan=1.0, posinf=1.0)
        if self.is_division:
            return count * value
        return torch.where(value == 0, torch.zeros_like(value), count / value)


def plain_name(node: Node) -> str:
    """Return the name of the operator that a node belongs to."""
    name: str = node.name()
    head, _, _ = name.partition("Backward")
    return head or name


def is_transparent(node: Node) -> bool:
    """Whether what is behind a node is worth as much as what is before it."""
    return node.name() in _TRANSPARENT


def is_none(loss: Tensor) -> bool:
    """Whether a step found nothing to learn: its loss has no graph, or 0 is a factor of all."""
    node = loss.grad_fn
    while node is not None and is_transparent(node):
        node = node.next_functions[0][0]
    factor = None if node is None else factor_of(node)
    return node is None or (factor is not None and factor.is_zero)


class SumOverRanksNode(Protocol):
    """The node of a sum over ranks, behind which are this rank's positions of a sequence."""

    num_summed: int
    """Elements of all ranks."""
    on_all_ranks: Callable[[Sequence[Tensor | bool]], tuple[Tensor, ...]]
    """Returns whether each of several flags is set on all ranks. Collective."""


def sum_over_ranks(node: Node) -> SumOverRanksNode | None:
    """Return the node as a sum over ranks if it is one."""
    return cast("SumOverRanksNode", node) if node.name() == "SumOverRanksBackward" else None


def is_sum(node: Node) -> bool:
    """Whether a node adds its operands, or puts them side by side."""
    return node.name() in _SUMS


def selection_of_rows(node: Node) -> Node | None:
    """Return the node by which one picks the largest or smallest along the first dimension."""
    inner: Node | None = node
    while inner is not None and inner.name() == "SliceBackward0":
        inner = inner.next_functions[0][0]
    if inner is None or inner.name() not in _SELECTIONS:
        return None
    dims = {0, -len(_saved(inner, "self_sym_sizes"))}
    return inner if _signed(_saved(inner, "dim")) in dims else None


def operands(node: Node) -> tuple[int, ...]:
    """Return which operands have a graph."""
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
    """Whether it reduces what was put together from terms, or a term that is one already."""
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
    """Return the operand of a product; None where a node is none.

    Of two operands with a graph it is the second one.
    """
    name = node.name()
    if name not in _PRODUCTS:
        return None
    is_division = name.startswith("Div")
    branches = operands(node)
    # Saved is what the other operand's gradient is made of.
    which = "self" if branches == (1,) else "other"
    value = getattr(node, f"_saved_{which}", None)
    is_scalar = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    has_dims = is_scalar and isinstance(value, Tensor) and value.ndim > 0
    return Factor(value, is_division, is_scalar, has_dims and numel_of_output(node) == 1)


def masks_of(node: Node) -> tuple[Tensor | bool, ...]:
    """Return whether a node lets nothing of its operand through; nothing if it is no mask."""
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
    """The value of a number of Python's, which needs no look at a device."""
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return float(value.detach())
    return None


def _signed(number: int) -> int:
    """Autograd shows saved integers without their sign."""
    return number - 2**64 if number >= 2**63 else number


def _saved(node: Node, name: str) -> Any:
    return getattr(node, f"_saved_{name}")


def gradients_of(loss: Tensor, values: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients of a loss; None of values that have none. The graph is kept."""
    wanted = [each for each in values if each.requires_grad]
    if not wanted or not loss.requires_grad:
        return [None] * len(values)
    made = iter(torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
    return [next(made) if each.requires_grad else None for each in values]
