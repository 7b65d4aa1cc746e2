"""Rules that combine the values logged for microbatches into the value of the batch.

``note`` keeps a value with the facts that rules need, ``rules`` yields each ``LogRule`` that it may
have, and ``combine`` applies one to the values of microbatches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from boltmesh.errors import ConfigError
from boltmesh.strategies.pipeline.loss.autograd_nodes import is_none
from boltmesh.strategies.pipeline.loss.reduction import Form, Source, kind_alone, terms_of
from boltmesh.strategies.torch_compat.tensors import functions_unwatched, scalar_on

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
    """Shape ``()``, fp64, without graph."""
    count: Tensor | float | None = None
    """Number of elements that it is a mean over; None if its graph does not show it."""
    is_sum: bool = False
    """Whether its graph shows a sum over rows."""
    is_certain: bool = False
    """Whether its graph alone proves that."""
    is_integer: bool = False
    precision: float = 1e-3
    """Relative difference that two ways to compute it may have."""
    batch_size: float | None = None
    """The user's argument of ``log``."""
    fold: Fold = "mean"
    """The user's ``reduce_fx``, for the batches of an epoch."""


@dataclass(frozen=True)
class LogRule:
    """A rule that combines the values of one key."""

    fold: Fold
    weights: Literal["own", "batch_size", "loss", "rows"] = "loss"
    """Weights of a mean: the number of elements that each value is a mean over, the user's
    ``batch_size``, the weight of the microbatch's loss, or its rows."""
    of: Literal["values", "logarithms", "squares"] = "values"
    """Terms of a mean: logarithms for perplexities, squares for roots."""


@dataclass(frozen=True)
class MicrobatchWeights:
    """Weights of microbatches, by number of the microbatch; tensors have the shape ``()``."""

    loss: Mapping[int, Tensor | float]
    rows: Mapping[int, float]

    def are_alike(self) -> bool:
        """Whether the weights of losses are proportional to rows: rules by them are then equal."""
        pairs = [(float(weight), self.rows[number]) for number, weight in self.loss.items()]
        if not pairs:
            return True
        one, first = pairs[0]
        return all(
            abs(one * rows - weight * first) <= 1e-6 * max(abs(one * rows), 1e-9)
            for weight, rows in pairs
        )


Key = tuple[str, str | None]
"""Name in a call of ``self.log``, and key of a dict that was logged under it."""

RETURNED = "training_step's result"
"""Takes the place of the name for numbers that a step returns in a dict beside its loss."""


def note(microbatch: int, value: Any, options: Mapping[str, Any]) -> Noted:
    """Return a logged value with the facts that rules need, without its graph.

    Args:
        microbatch: Number of the microbatch.
        value: A number, or a tensor with one element.
        options: Keyword arguments of the call of ``log``.
    """
    with functions_unwatched():  # the step is watched, and these calls are not part of it
        tensor = torch.as_tensor(value)
        count, is_sum, is_certain = _count_of(tensor)
        batch_size = options.get("batch_size")
        return Noted(
            microbatch,
            tensor.detach().double().reshape(()),
            count,
            is_sum=is_sum,
            is_certain=is_certain,
            is_integer=not tensor.is_floating_point() and tensor.dtype != torch.bool,
            precision=3e-2 if tensor.dtype in {torch.float16, torch.bfloat16} else 1e-3,
            batch_size=None if batch_size is None else float(batch_size),
            fold=_FOLDS.get(options.get("reduce_fx", "mean"), "mean"),
        )


def _count_of(value: Tensor) -> tuple[Tensor | float | None, bool, bool]:
    """Return a scalar's count, whether it is a sum, and whether its graph alone proves that.

    The count is None if the graph does not show it.
    """
    unknown = None, False, False
    try:
        terms = list(terms_of(value.grad_fn, Form(), lambda _: Source(rows=True)))
    except ConfigError:
        return unknown
    sums = {each.reductions == {"sum"} and not each.divisors for each in terms}
    if len(sums) != 1 or not all(each.is_reduced for each in terms):
        return unknown
    try:
        is_certain = bool([kind_alone(each, 1) for each in terms])
    except ConfigError:
        is_certain = False
    return 0.0 if is_none(value) else terms[0].counting().count, sums.pop(), is_certain


def returned_numbers(microbatch: int, result: Any) -> dict[Key, Noted]:
    """Return the numbers that a step returned beside its loss, by key."""
    if not isinstance(result, Mapping):
        return {}
    return {
        (RETURNED, key): note(microbatch, value, {})
        for key, value in result.items()
        if key != "loss" and is_number(value)
    }


def is_number(value: Any) -> bool:
    """Whether a value is a number or a tensor of shape ``()``, and not a bool."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def combine(rule: LogRule, noted: Sequence[Noted], weights: MicrobatchWeights) -> Tensor:
    """Return the batch's value, shape ``()`` and fp64.

    Args:
        rule: The rule of the key.
        noted: Values of the microbatches, at least one.
        weights: Weights of the microbatches.
    """
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
    # The mean of no elements is NaN, and its weight is 0.
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
    """Return the rule of a key without a proof."""
    first = noted[0]
    if all(each.count is not None and each.is_certain for each in noted):
        return LogRule("sum") if first.is_sum else LogRule("mean", "own")
    if first.batch_size is not None:
        return LogRule("mean", "batch_size")
    if first.fold != "mean":
        return LogRule(first.fold)
    return LogRule("sum") if first.is_integer else LogRule("mean")


def rules(noted: Sequence[Noted]) -> Iterator[LogRule]:
    """Yield the rules that a key may have, preferred ones first."""
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
