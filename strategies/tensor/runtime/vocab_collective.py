"""Functions of torch on logits of which each rank has some tokens, for which ranks communicate.

Lookups in a table sum what the ranks found; matrix products have tokens as outputs or inputs.
Reductions over tokens and losses exchange a few numbers per position, never logits.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from boltmesh.strategies.tensor.runtime import vocab_softmax
from boltmesh.strategies.tensor.runtime.collectives import all_gather, reduce_gradient, reduce_sum
from boltmesh.strategies.tensor.runtime.vocab_tensor import (
    NO_RULE,
    Vocabulary,
    VocabularyTensor,
    gather,
    rule_for,
    unwrap,
    wrap,
)


@rule_for("embedding")
def embedding(
    func: Callable[..., Any],
    tokens: Tensor,
    table: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look up the tokens that this rank has and add up what all ranks found: one has each.

    Rows without a gradient stay so. What counts or writes rows needs the whole table.
    """
    if (
        isinstance(tokens, VocabularyTensor)
        or table.divided_dim != 0
        or max_norm is not None
        or scale_grad_by_freq
        or sparse
    ):
        return NO_RULE
    vocabulary: Vocabulary = table.vocabulary
    places, is_others = vocabulary.find(tokens)
    own_padding = None
    if padding_idx is not None:
        own_padding = padding_idx % vocabulary.size - vocabulary.start
        own_padding = own_padding if 0 <= own_padding < vocabulary.length else None
    found = F.embedding(places, unwrap(table), own_padding)
    return reduce_sum(found.masked_fill(is_others.unsqueeze(-1), 0), vocabulary.group)


@rule_for("linear")
def linear(func: Callable[..., Any], inputs: Any, weight: Any, bias: Tensor | None = None) -> Any:
    """Compute the logits of this rank's tokens."""
    if not _makes_logits(inputs, weight, 0):
        return NO_RULE
    vocabulary: Vocabulary = weight.vocabulary
    if isinstance(bias, VocabularyTensor):
        bias = unwrap(bias)
    elif bias is not None:
        bias = vocabulary.take(bias, 0)
    return _logits(
        func(reduce_gradient(inputs, vocabulary.group), unwrap(weight), bias), vocabulary
    )


@rule_for("matmul mm __matmul__")
def product(func: Callable[..., Any], left: Any, right: Any) -> Any:
    """Compute logits by a transposed table, or the expectation of a table's rows."""
    if _makes_logits(left, right, 1):
        vocabulary: Vocabulary = right.vocabulary
        return _logits(func(reduce_gradient(left, vocabulary.group), unwrap(right)), vocabulary)
    if (
        isinstance(left, VocabularyTensor)
        and isinstance(right, VocabularyTensor)
        and left.vocabulary.is_divided_like(right.vocabulary)
        and left.divided_dim == left.dim() - 1
        and right.dim() == 2
        and right.divided_dim == 0
    ):
        return reduce_sum(func(unwrap(left), unwrap(right)), left.vocabulary.group)
    return NO_RULE


def _makes_logits(inputs: Any, weight: Any, token_dim: int) -> bool:
    return (
        isinstance(weight, VocabularyTensor)
        and not isinstance(inputs, VocabularyTensor)
        and weight.dim() == 2
        and weight.divided_dim == token_dim
    )


def _logits(local: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Divided, unless whole ones were asked for."""
    logits = wrap(local, vocabulary, local.dim() - 1)
    return gather(logits) if vocabulary.loss_parallel is False else logits


_Dims = int | tuple[int, ...] | list[int] | None


@rule_for("sum mean")
def add_up(
    func: Callable[..., Any],
    divided: Any,
    dim: _Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Sum, or average over the tokens of all ranks."""
    if not isinstance(divided, VocabularyTensor) or isinstance(dim, torch.dtype):
        return NO_RULE
    dims = _dims(divided, dim)
    kind = func(divided.local.detach().new_zeros(1), dtype=dtype).dtype
    local = unwrap(divided)
    if kind.is_floating_point or kind.is_complex:
        # Parts of a sum are not rounded to 16 bits before they are added up.
        local = vocab_softmax.in_sum_type(local.to(kind) if dtype is not None else local)
    if divided.divided_dim not in dims:
        left = divided.divided_dim - (0 if keepdim else sum(d < divided.divided_dim for d in dims))
        return wrap(func(local, dims, keepdim).to(kind), divided.vocabulary, left)
    total = reduce_sum(local.sum(dims, keepdim), divided.vocabulary.group)
    if func.__name__ == "mean":
        total = total / prod(divided.shape[each] for each in dims)
    return total.to(kind)


@rule_for("logsumexp")
def log_sum_exp(func: Callable[..., Any], divided: Any, dim: _Dims, keepdim: bool = False) -> Any:
    """Return what softmax divides by, as its logarithm, such as a z-loss is made of."""
    if not isinstance(divided, VocabularyTensor) or _dims(divided, dim) != (divided.divided_dim,):
        return NO_RULE
    last = unwrap(divided).movedim(divided.divided_dim, -1)
    total = vocab_softmax.log_sum_exp(last, divided.vocabulary)
    return total.unsqueeze(divided.divided_dim) if keepdim else total


@rule_for("argmax")
def argmax(
    func: Callable[..., Any], divided: Any, dim: int | None = None, keepdim: bool = False
) -> Any:
    """Return the token with the highest score; of several the first, as torch does."""
    if (
        not isinstance(divided, VocabularyTensor)
        or dim is None
        or dim % divided.dim() != divided.divided_dim
    ):
        return NO_RULE
    return _best_token(divided, keepdim=keepdim)


@rule_for("max")
def maximum(
    func: Callable[..., Any], divided: Any, dim: int | Tensor | None = None, keepdim: bool = False
) -> Any:
    """Return the highest score and its token."""
    if (
        not isinstance(divided, VocabularyTensor)
        or not isinstance(dim, int)
        or dim % divided.dim() != divided.divided_dim
    ):
        return NO_RULE
    tokens = _best_token(divided, keepdim=False)
    last = unwrap(divided).movedim(divided.divided_dim, -1)
    values = vocab_softmax.pick(last, tokens, divided.vocabulary)
    if keepdim:
        values = values.unsqueeze(divided.divided_dim)
        tokens = tokens.unsqueeze(divided.divided_dim)
    return torch.return_types.max((values, tokens))


@rule_for("gather take_along_dim")
def gather_tokens(
    func: Callable[..., Any], divided: Any, dim: Any, index: Any, *, sparse_grad: bool = False
) -> Any:
    """Return the scores of one token per position, such as the log-probabilities of targets."""
    if func.__name__ == "take_along_dim":
        dim, index = index, dim
    if (
        not isinstance(divided, VocabularyTensor)
        or not isinstance(index, Tensor)
        or not isinstance(dim, int)
        or dim % divided.dim() != divided.divided_dim
    ):
        return NO_RULE
    of_one = [1 if d == divided.divided_dim else size for d, size in enumerate(divided.shape)]
    if list(index.shape) != of_one:
        return NO_RULE
    last = unwrap(divided).movedim(divided.divided_dim, -1)
    picked = vocab_softmax.pick(last, index.squeeze(divided.divided_dim), divided.vocabulary)
    return picked.unsqueeze(divided.divided_dim)


def _best_token(divided: VocabularyTensor, *, keepdim: bool) -> Tensor:
    vocabulary = divided.vocabulary
    last = divided.local.detach().movedim(divided.divided_dim, -1)
    values, places = last.max(-1)
    # One after the other, because tokens are counted in another type than scores.
    all_values = all_gather(values.unsqueeze(0), vocabulary.group, 0)
    all_tokens = all_gather((places + vocabulary.start).unsqueeze(0), vocabulary.group, 0)
    tokens = all_tokens.gather(0, all_values.argmax(0, keepdim=True)).squeeze(0)
    return tokens.unsqueeze(divided.divided_dim) if keepdim else tokens


def _dims(divided: VocabularyTensor, dim: _Dims) -> tuple[int, ...]:
    if dim is None or dim == () or dim == []:
        return tuple(range(divided.dim()))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(each % divided.dim() for each in dims)


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
