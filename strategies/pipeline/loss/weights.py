"""Weights that make the losses of microbatches add up to the loss of the batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from typing_extensions import override

from boltmesh.strategies.pipeline.loss.autograd_nodes import behind_transparent, is_none
from boltmesh.strategies.pipeline.loss.reduction import (
    BatchLossError,
    Form,
    Kind,
    Term,
    kind_alone,
    read_open,
)

Read = Callable[[Tensor], tuple[Form, list[Term]] | None]
"""Returns the form of a loss with known kinds, and its terms; None if only the graph is known."""

Weighable = tuple[Term, Kind]


@dataclass(frozen=True)
class _Count:
    """Count and size of a term of the first microbatch, see ``Term``."""

    count: Tensor | float
    size: float


class StepWeights:
    """Weights the microbatches of a step one after the other, before the total is known.

    Each loss is multiplied by its count, relative to the size of the step's first microbatch, so
    that backward passes need not wait; accumulated losses and gradients are divided by ``total``
    at the end. Made for each step.
    """

    def __init__(self, read: Read, *, is_single: bool = False) -> None:
        """Set the reader of losses.

        Args:
            read: Reads a loss.
            is_single: Whether the batch is one microbatch, whose loss may have any form.
        """
        self.total: Tensor | float = 0.0
        """Sum of the weights so far, divisor of the step's gradients and losses; shape ``()`` and
        fp32 if a tensor."""
        self._read = read
        self._is_single = is_single
        self._kind: Kind | None = None
        self._first: list[_Count] = []

    def weigh(self, loss: Tensor, rows: int) -> tuple[Tensor, Tensor | float]:
        """Return a microbatch's loss multiplied by its weight, and the weight.

        Args:
            loss: Shape ``()``, with its graph. The weight of a loss that ``is_none`` is 0.
            rows: Rows of the microbatch, the count of a scalar that a layer made.

        Returns:
            The loss in fp32 or fp64, shape ``()``; and the weight, shape ``()`` if a tensor.

        Raises:
            BatchLossError: The loss has terms with different counts, for which there is no single
                weight, or it cannot be read.
        """
        if loss.dtype in {torch.float16, torch.bfloat16}:
            loss = loss.float()
        if self._is_single:
            self.total = 1.0
            return loss, 1.0
        if is_none(loss):
            # With a graph, an optimizer steps by gradients of zero, as in one process.
            return torch.zeros_like(loss) if loss.grad_fn is None else loss * 0.0, 0.0
        terms = _terms(loss, self._read(loss), rows)
        data = [each for each in terms if each[1] != "penalty"]
        kinds = {kind for _, kind in data}
        if self._kind is not None and len(kinds) == 1 and not kinds <= {self._kind}:
            raise BatchLossError(
                f"training_step's loss is a {next(iter(kinds))} over the rows of one microbatch, "
                f"and looked like a {self._kind} for another one of the same batch and for those "
                f"before: what it divides by was the same for all of them.",
                ", or divide by a number of rows, or of elements that batches have often",
            )
        if len(kinds) > 1:
            raise BatchLossError(
                "training_step adds a mean and a sum over the batch, so its loss depends on how "
                "the batch is cut into microbatches.",
                ", or divide the sum by the number of its rows",
            )
        self._kind = self._kind or next(iter(kinds), None)
        if self._kind == "sum":
            return self._weigh_sum(loss, has_penalty=len(data) < len(terms))
        return self._weigh_mean(loss, [term for term, _ in data], rows)

    def _weigh_sum(self, loss: Tensor, *, has_penalty: bool) -> tuple[Tensor, float]:
        if has_penalty:
            raise BatchLossError(
                "training_step adds something that does not depend on the batch, such as a penalty "
                "on weights, to a sum over the batch, so it would count once for every microbatch.",
                ", or divide the sum by the number of its rows",
            )
        self.total = 1.0
        return loss, 1.0

    def _weigh_mean(
        self, loss: Tensor, terms: list[Term], rows: int
    ) -> tuple[Tensor, Tensor | float]:
        # Counts without their terms, which would keep the graph alive.
        self._first = self._first or [_Count(each.count, each.size) for each in terms]
        if not terms:  # only penalties
            weight: Tensor | float = float(rows)
        else:
            weight = terms[0].count / self._first[0].size
            self._refuse_uneven(terms, weight)
        self.total = self.total + weight
        return _scaled(loss, weight), weight

    def _refuse_uneven(self, terms: list[Term], weight: Tensor | float) -> None:
        if len(terms) == 1 and len(self._first) == 1:
            return
        first_count, size = float(self._first[0].count), self._first[0].size
        same = len(terms) == len(self._first) and all(
            math.isclose(
                float(each.count) * first_count,
                float(weight) * size * float(first.count),
                rel_tol=1e-5,
            )
            for each, first in zip(terms, self._first, strict=True)
        )
        if not same:
            parts = ", ".join(f"{each.operator} over {float(each.count):g}" for each in terms)
            raise BatchLossError(
                f"training_step adds means over different things ({parts}), which microbatches "
                f"hold in different proportions, so no weight makes their losses the batch's.",
                ", or take both means over the same elements",
            )


def _terms(loss: Tensor, known: tuple[Form, list[Term]] | None, rows: int) -> list[Weighable]:
    if known is None:
        return read_open(loss.grad_fn, rows)
    form, raw_terms = known
    terms: list[Weighable] = []
    for raw in raw_terms:
        per_row = form.per_row.get(raw.place)
        term = raw.counting(None if per_row is None else per_row * rows)
        kind = form.kinds.get(term.place)
        if kind == "received":
            # A layer made it: its graph is on this rank if the layer is.
            inner = read_open(term.end, rows)
            terms += [(_behind(term, each), each_kind) for each, each_kind in inner]
        else:
            terms.append(kind_alone(term, rows) if kind is None else (term, kind))
    return terms


def _behind(term: Term, inner: Term) -> Term:
    """Return a layer's term, multiplied by the factors behind the layer."""
    return replace(inner, count=inner.count * term.count, size=inner.size * term.size)


def _scaled(loss: Tensor, weight: Tensor | float) -> Tensor:
    """Multiply a loss by its weight; the mean of no elements is NaN with weight 0, and becomes 0.

    A finite loss with weight 0 keeps its graph: an optimizer steps by gradients of zero, as in one
    process.
    """
    if not isinstance(weight, Tensor):
        if weight == 1.0:
            return loss  # nearly always; a product takes two operators here and two on the way back
        return loss * weight if weight or bool(loss.isfinite()) else torch.zeros_like(loss)
    node = behind_transparent(loss.grad_fn)
    if node is not None and node.name().startswith("NllLoss"):
        # Its backward pass does not divide 0 by 0.
        return _Weighed.apply(loss, weight)  # type: ignore[no-any-return, no-untyped-call]
    if _hook_divisions(node, weight):
        return _Weighed.apply(loss, weight)  # type: ignore[no-any-return, no-untyped-call]
    is_number = (weight != 0) | loss.detach().isfinite()
    return loss * weight if bool(is_number) else torch.zeros_like(loss)


def _hook_divisions(node: Node | None, weight: Tensor) -> bool:
    """Make the last products and divisions of a loss give zero gradients if its weight is 0.

    A division by zero gives NaN gradients. A check of the divisor would synchronize with the
    device.

    Returns:
        Whether the loss ends in a division.
    """
    has_division = False
    while node is not None and node.name() in _PRODUCTS:
        has_division = has_division or node.name() == "DivBackward0"
        node.register_hook(partial(_without_nan, weight))
        branches = [each for each, _ in node.next_functions if each is not None]
        node = behind_transparent(branches[0]) if len(branches) == 1 else None
    return has_division


_PRODUCTS = frozenset({"DivBackward0", "MulBackward0"})


def _without_nan(
    weight: Tensor, gradients: tuple[Tensor | None, ...], _: object
) -> tuple[Tensor | None, ...]:
    return tuple(
        None if each is None else torch.where(weight == 0, torch.zeros_like(each), each)
        for each in gradients
    )


class _Weighed(torch.autograd.Function):
    """``loss * weight``, and 0 if the weight is 0, without device synchronization."""

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
