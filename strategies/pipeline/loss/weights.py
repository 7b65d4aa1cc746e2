"""Weights of microbatches: so that their losses add up to the batch's, and what they log as well.

``StepWeights`` weighs the losses of microbatches. A ``LogRule`` says how the values that a step
logs for microbatches become the value of the batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Number
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node
from typing_extensions import override

from boltmesh.strategies.pipeline.loss.autograd_nodes import is_none
from boltmesh.strategies.pipeline.loss.reduction import (
    BatchLossError,
    Form,
    Kind,
    Term,
    behind_transparent,
    count_of,
    kind_alone,
    read_open,
)
from boltmesh.strategies.torch_compat.tensors import functions_unwatched, scalar_on

Read = Callable[[Tensor], tuple[Form, list[Term]] | None]
"""Gives the form of a loss, of which its kinds are known, and its terms; None where the graph has
to do."""

Weighable = tuple[Term, Kind]


@dataclass(frozen=True)
class _Count:
    """What a term of the first microbatch counts, see ``Term``."""

    count: Tensor | float
    size: float


class StepWeights:
    """Weighs the microbatches of a step, one after the other, while the total is not known yet.

    Each loss is scaled by what it counts, relative to the size of the step's first microbatch, so
    that backward passes may begin at once; what was accumulated is divided by ``total`` in the
    end. Made for each step.
    """

    def __init__(self, read: Read, *, is_single: bool = False) -> None:
        """Take how losses are read.

        Args:
            read: Reads a loss.
            is_single: Whether the batch is one microbatch, whose loss may be anything.
        """
        self.total: Tensor | float = 0.0
        """What the weights add up to so far: the step's gradients and losses are divided by it.
        fp32 where it is a tensor."""
        self._read = read
        self._is_single = is_single
        self._kind: Kind | None = None
        self._first: list[_Count] = []

    def weigh(self, loss: Tensor, rows: int) -> tuple[Tensor, Tensor | float]:
        """Return a microbatch's loss scaled by its weight, at least fp32, and the weight.

        Args:
            loss: Scalar, with its graph. One of nothing is worth nothing, see ``is_none``.
            rows: Of the microbatch; what a scalar of a layer is worth.

        Raises:
            BatchLossError: When the loss has parts that count different things, which no one number
                can weigh, or when it cannot be read.
        """
        if loss.dtype in {torch.float16, torch.bfloat16}:
            loss = loss.float()
        if self._is_single:
            self.total = 1.0
            return loss, 1.0
        if is_none(loss):
            # Where it has a graph, an optimizer steps by gradients of zero, as in one process.
            return torch.zeros_like(loss) if loss.grad_fn is None else loss * 0.0, 0.0
        found = _terms(loss, self._read(loss), rows)
        data = [each for each in found if each[1] != "penalty"]
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
            return self._weigh_sum(loss, has_penalty=len(data) < len(found))
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
        self, loss: Tensor, found: list[Term], rows: int
    ) -> tuple[Tensor, Tensor | float]:
        # Without the terms, which hold the graph and all that it keeps.
        self._first = self._first or [_Count(each.count, each.size) for each in found]
        if not found:  # penalties alone
            weight: Tensor | float = float(rows)
        else:
            weight = found[0].count / self._first[0].size
            self._refuse_uneven(found, weight)
        self.total = self.total + weight
        return _scaled(loss, weight), weight

    def _refuse_uneven(self, found: list[Term], weight: Tensor | float) -> None:
        if len(found) == 1 and len(self._first) == 1:
            return
        first_count, size = float(self._first[0].count), self._first[0].size
        same = len(found) == len(self._first) and all(
            math.isclose(
                float(each.count) * first_count,
                float(weight) * size * float(first.count),
                rel_tol=1e-5,
            )
            for each, first in zip(found, self._first, strict=True)
        )
        if not same:
            parts = ", ".join(f"{each.operator} over {float(each.count):g}" for each in found)
            raise BatchLossError(
                f"training_step adds means over different things ({parts}), which microbatches "
                f"hold in different proportions, so no weight makes their losses the batch's.",
                ", or take both means over the same elements",
            )


def _terms(loss: Tensor, known: tuple[Form, list[Term]] | None, rows: int) -> list[Weighable]:
    if known is None:
        return read_open(loss.grad_fn, rows)
    form, found = known
    terms: list[Weighable] = []
    for raw in found:
        per_row = form.per_row.get(raw.place)
        term = raw.counting(None if per_row is None else per_row * rows)
        kind = form.kinds.get(term.place)
        if kind == "received":
            # A layer made it: its graph is here if that layer is.
            inner = read_open(term.end, rows)
            terms += [(_behind(term, each), each_kind) for each, each_kind in inner]
        else:
            terms.append(kind_alone(term, rows) if kind is None else (term, kind))
    return terms


def _behind(term: Term, inner: Term) -> Term:
    """The factors on both sides of a layer's end."""
    return replace(inner, count=inner.count * term.count, size=inner.size * term.size)


def _scaled(loss: Tensor, weight: Tensor | float) -> Tensor:
    """Scale; a mean over nothing is not a number, and worth nothing.

    What is a number and worth nothing keeps its graph: an optimizer steps by gradients of zero, as
    in one process.
    """
    if not isinstance(weight, Tensor):
        if weight == 1.0:
            return loss  # nearly always; a product takes two operators here and two on the way back
        return loss * weight if weight or bool(loss.isfinite()) else torch.zeros_like(loss)
    node = behind_transparent(loss.grad_fn)
    if node is not None and node.name().startswith("NllLoss"):
        # Its backward pass divides no zero by zero.
        return _Weighed.apply(loss, weight)  # type: ignore[no-any-return, no-untyped-call]
    if _hook_divisions(node, weight):
        return _Weighed.apply(loss, weight)  # type: ignore[no-any-return, no-untyped-call]
    is_number = (weight != 0) | loss.detach().isfinite()
    return loss * weight if bool(is_number) else torch.zeros_like(loss)


def _hook_divisions(node: Node | None, weight: Tensor) -> bool:
    """Let the products and divisions that end a loss give gradients of 0 where its weight is 0.

    A division by zero gives gradients that are no numbers. Reading whether it is one would wait for
    the device.

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


Fold = Literal["mean", "sum", "min", "max"]

_FOLDS: dict[Any, Fold] = {
    "mean": "mean", torch.mean: "mean", "sum": "sum", torch.sum: "sum", "avg": "mean",
    "min": "min", torch.min: "min", min: "min", "max": "max", torch.max: "max", max: "max",
}  # fmt: skip
"""``reduce_fx`` of ``LightningModule.log``."""


@dataclass(frozen=True)
class Noted:
    """A value that one microbatch logged under a key."""

    microbatch: int
    value: Tensor
    """0-dim, fp64."""
    count: Tensor | float | None = None
    """What it was averaged over, where it has a graph that tells."""
    is_sum: bool = False
    """Whether its graph says that it is a sum over rows."""
    is_certain: bool = False
    """Whether its graph alone is enough to believe that."""
    is_integer: bool = False
    precision: float = 1e-3
    """Relative: what two ways to compute it may differ by."""
    batch_size: float | None = None
    """As the user gave it."""
    fold: Fold = "mean"
    """As the user gave it, for the batches of an epoch."""


@dataclass(frozen=True)
class LogRule:
    """How the values of one key are put together."""

    fold: Fold
    weights: Literal["own", "batch_size", "loss", "rows"] = "loss"
    """Of a mean: what each value was averaged over, the user's ``batch_size``, what the
    microbatch's loss is worth, or its rows."""
    of: Literal["values", "logarithms", "squares"] = "values"
    """Of a mean: what is averaged. Perplexities are by their logarithms, roots by their squares."""


@dataclass(frozen=True)
class MicrobatchWeights:
    """What microbatches are worth, by their number."""

    loss: Mapping[int, Tensor | float]
    rows: Mapping[int, float]

    def are_alike(self) -> bool:
        """Whether losses are worth what rows are: then it does not matter which is taken."""
        pairs = [(float(weight), self.rows[number]) for number, weight in self.loss.items()]
        return all(
            abs(one * rows - weight * first) <= 1e-6 * max(abs(one * rows), 1e-9)
            for weight, rows in pairs
            for one, first in pairs[:1]
        )


Key = tuple[str, str | None]
"""The name of a call of ``self.log``, and the key of the dict that was logged under it."""

RETURNED = "training_step's result"
"""Stands for the name, of numbers that a step returns in a dict beside its loss."""


def note(microbatch: int, value: Any, options: Mapping[str, Any]) -> Noted:
    """Keep what is to be known of a logged value; its graph is let go."""
    with functions_unwatched():  # the step is, and this is none of its doing
        return _noted(microbatch, torch.as_tensor(value), options)


def check_loggable(name: str, value: Any) -> None:
    """Refuse what Lightning would, where the author called ``self.log`` with it.

    Raises:
        ValueError: With what to log instead.
    """
    called = f"`self.log({name!r}, ...)` was called with"
    if not isinstance(value, Number | Tensor):
        raise ValueError(  # noqa: TRY004 - as Lightning does
            f"{called} a {type(value).__name__}, which cannot be logged. Log numbers, tensors of "
            f"one element, metrics, or a dictionary of these."
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"{called} a tensor of {value.numel()} elements, of which one has to be made: such as "
            f"its mean()."
        )


def _noted(microbatch: int, tensor: Tensor, options: Mapping[str, Any]) -> Noted:
    found = count_of(tensor)
    batch_size = options.get("batch_size")
    return Noted(
        microbatch,
        tensor.detach().double().reshape(()),
        None if found is None else found.count,
        is_sum=found is not None and found.is_sum,
        is_certain=found is not None and found.is_certain,
        is_integer=not tensor.is_floating_point() and tensor.dtype != torch.bool,
        precision=3e-2 if tensor.dtype in {torch.float16, torch.bfloat16} else 1e-3,
        batch_size=None if batch_size is None else float(batch_size),
        fold=_FOLDS.get(options.get("reduce_fx", "mean"), "mean"),
    )


def returned_numbers(microbatch: int, result: Any) -> dict[Key, Noted]:
    """Return the numbers that a step returned beside its loss, by their keys."""
    if not isinstance(result, Mapping):
        return {}
    return {
        (RETURNED, key): note(microbatch, value, {})
        for key, value in result.items()
        if key != "loss" and is_number(value)
    }


def is_number(value: Any) -> bool:
    """Whether a value is a number, in a tensor or not, and no truth."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def combine(rule: LogRule, noted: Sequence[Noted], weights: MicrobatchWeights) -> Tensor:
    """Return the batch's value, 0-dim and fp64."""
    values = torch.stack([each.value for each in noted])
    if len(noted) == 1:
        return values[0]
    folds: dict[Fold, Callable[[Tensor], Tensor]] = {
        "sum": torch.sum, "min": torch.amin, "max": torch.amax,
    }  # fmt: skip
    if rule.fold != "mean":
        return folds[rule.fold](values)
    chosen = _row([_weight(rule, each, weights) for each in noted], values)
    rows = _row([weights.rows.get(each.microbatch, 1.0) for each in noted], values)
    chosen = torch.where((chosen == 0).all(), rows, chosen)
    if rule.of == "logarithms":
        values = values.log()
    elif rule.of == "squares":
        values = values.square()
    # A mean over nothing is not a number, and worth nothing.
    mean = torch.where(chosen == 0, 0.0, values * chosen).sum() / chosen.sum()
    return {"values": mean, "logarithms": mean.exp(), "squares": mean.sqrt()}[rule.of]


def _row(weights: Sequence[Tensor | float], like: Tensor) -> Tensor:
    return torch.stack([scalar_on(each, like.device) for each in weights])


def _weight(rule: LogRule, noted: Noted, weights: MicrobatchWeights) -> Tensor | float:
    if rule.weights == "own" and noted.count is not None:
        return noted.count
    if rule.weights == "batch_size" and noted.batch_size is not None:
        return noted.batch_size
    if rule.weights == "rows":
        return weights.rows.get(noted.microbatch, 1.0)
    return weights.loss.get(noted.microbatch, 1.0)


def usual_rule(noted: Sequence[Noted]) -> LogRule:
    """Return the rule of a key where nothing was proved."""
    first = noted[0]
    if all(each.count is not None and each.is_certain for each in noted):
        return LogRule("sum") if first.is_sum else LogRule("mean", "own")
    if first.batch_size is not None:
        return LogRule("mean", "batch_size")
    if first.fold != "mean":
        return LogRule(first.fold)
    return LogRule("sum") if first.is_integer else LogRule("mean")


def rules(noted: Sequence[Noted]) -> Iterator[LogRule]:
    """Yield the rules that a key may have; where several fit, the first one is meant."""
    first = noted[0]
    if all(each.count is not None for each in noted):
        yield LogRule("sum") if first.is_sum else LogRule("mean", "own")
    yield usual_rule(noted)
    yield LogRule("mean", "loss")
    yield LogRule("mean", "rows")
    yield LogRule("sum")
    yield LogRule("max")
    yield LogRule("min")
    for of in ("logarithms", "squares"):
        yield LogRule("mean", "loss", of)
        yield LogRule("mean", "rows", of)
