"""Functions that leave one number of many: over tokens, ranks add up or compare theirs."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from boltmesh.strategies.tensor.runtime import vocab_softmax
from boltmesh.strategies.tensor.runtime.collectives import all_gather, reduce_sum
from boltmesh.strategies.tensor.runtime.vocab_tensor import (
    NO_RULE,
    VocabularyTensor,
    rule_for,
    unwrap,
    wrap,
)

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
