"""Losses over a vocabulary: ranks exchange a few numbers per position, never logits."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from boltmesh.strategies.tensor.runtime import vocab_softmax
from boltmesh.strategies.tensor.runtime.vocab_tensor import (
    NO_RULE,
    VocabularyTensor,
    rule_for,
    unwrap,
    wrap,
)


@rule_for("cross_entropy")
def cross_entropy_loss(
    func: Callable[..., Any],
    logits: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the loss where targets are tokens; probabilities as targets need whole logits."""
    if size_average is not None or reduce is not None or not _fits(logits, target, weight):
        return NO_RULE
    losses, counted = vocab_softmax.cross_entropy(
        _rows(logits),
        target.reshape(-1),
        logits.vocabulary,
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    return _reduced(losses, counted, reduction, target, _result_type(F.cross_entropy, logits))


@rule_for("nll_loss")
def nll_loss(
    func: Callable[..., Any],
    scores: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """Compute the loss of logarithms of probabilities."""
    if size_average is not None or reduce is not None or not _fits(scores, target, weight):
        return NO_RULE
    losses, counted = vocab_softmax.negative_log_likelihood(
        _rows(scores),
        target.reshape(-1),
        scores.vocabulary,
        weight=weight,
        ignore_index=ignore_index,
    )
    return _reduced(losses, counted, reduction, target, _result_type(F.nll_loss, scores))


@rule_for("log_softmax softmax")
def normalize(
    func: Callable[..., Any],
    logits: Any,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Any:
    """Normalise over the tokens, or, as any function of one dimension, over another."""
    if not isinstance(logits, VocabularyTensor) or dim is None or not isinstance(_stacklevel, int):
        return NO_RULE
    local = unwrap(logits)
    if dim % logits.dim() != logits.divided_dim:
        return wrap(func(local, dim, dtype=dtype), logits.vocabulary, logits.divided_dim)
    # Asks torch for the type, which autocast may have a say in.
    kind = func(local.detach().new_zeros(1), 0, dtype=dtype).dtype
    over = vocab_softmax.softmax if func.__name__ == "softmax" else vocab_softmax.log_softmax
    result = over(local.movedim(logits.divided_dim, -1).to(kind), logits.vocabulary)
    return wrap(result.movedim(-1, logits.divided_dim), logits.vocabulary, logits.divided_dim)


def _fits(logits: Any, target: Any, weight: Any) -> bool:
    """Whether the classes of a loss are the divided tokens, and its targets some of them."""
    if not isinstance(logits, VocabularyTensor) or isinstance(target, VocabularyTensor):
        return False
    shape = list(logits.shape)
    class_dim = 0 if len(shape) == 1 else 1
    shape.pop(class_dim)
    return (
        logits.divided_dim == class_dim
        and logits.is_floating_point()
        and not target.is_floating_point()
        and list(target.shape) == shape
        and not isinstance(weight, VocabularyTensor)
        and (weight is None or (weight.dim() == 1 and len(weight) == logits.vocabulary.size))
    )


def _rows(logits: VocabularyTensor) -> Tensor:
    """This rank's part, one row per position."""
    return unwrap(logits).movedim(logits.divided_dim, -1).reshape(-1, logits.vocabulary.length)


def _result_type(loss: Callable[..., Tensor], logits: VocabularyTensor) -> torch.dtype:
    """The type that torch's own loss has for such logits, which autocast may have a say in."""
    tiny = logits.local.detach().new_zeros(1, 1)
    return loss(tiny, torch.zeros(1, dtype=torch.long, device=tiny.device)).dtype


def _reduced(
    losses: Tensor, counted: Tensor, reduction: str, target: Tensor, kind: torch.dtype
) -> Any:
    if reduction not in {"none", "mean", "sum"}:
        return NO_RULE
    result = vocab_softmax.reduced(losses, counted, reduction).to(kind)
    return result.reshape(target.shape) if reduction == "none" else result
