"""Tables and heads: looking tokens up, and matrix products whose outputs or inputs are tokens."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from boltmesh.strategies.tensor.runtime.collectives import reduce_gradient, reduce_sum
from boltmesh.strategies.tensor.runtime.vocab_ranges import Vocabulary
from boltmesh.strategies.tensor.runtime.vocab_tensor import (
    NO_RULE,
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
