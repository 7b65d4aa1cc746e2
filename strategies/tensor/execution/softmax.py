"""Softmax and its relatives over a vocabulary of which each rank has some tokens.

Two numbers per position are all that ranks tell each other: the largest logit and the sum of the
exponentials. Both are kept in fp32 (fp64 for fp64), whatever the type of the logits.

Shapes: ``(..., v)``, v tokens of this rank after any dimensions of positions.

Source: Megatron-LM, Shoeybi et al. 2019, section 3, https://arxiv.org/abs/1909.08053
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from boltmesh.strategies.tensor.execution.collectives import all_reduce
from boltmesh.strategies.tensor.execution.vocabulary_part import Vocabulary


def log_softmax(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return this rank's part of the logarithms of the probabilities. Collective."""
    return cast("Tensor", _LogSoftmax.apply(logits, vocabulary))  # type: ignore[no-untyped-call]


def softmax(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return this rank's part of the probabilities. Collective."""
    return cast("Tensor", _Softmax.apply(logits, vocabulary))  # type: ignore[no-untyped-call]


def log_sum_exp(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the logarithm of the sum of the exponentials of all tokens. Collective."""
    return cast("Tensor", _LogSumExp.apply(logits, vocabulary))  # type: ignore[no-untyped-call]


def pick(scores: Tensor, tokens: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the score of one token per position, alike on all ranks. Collective.

    Raises:
        IndexError: A token is not of the vocabulary.
    """
    return cast("Tensor", _Pick.apply(scores, tokens, vocabulary))  # type: ignore[no-untyped-call]


def in_sum_type(values: Tensor) -> Tensor:
    """Return values in the type that sums over a vocabulary are taken in."""
    return values if values.dtype == torch.float64 else values.float()


def log_probabilities(logits: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return those of this rank's tokens, and what was subtracted, in fp32. Collective.

    No gradient. Where all logits of a position are -inf, or one is inf, they are nan as in torch.
    """
    distances = in_sum_type(logits.detach())
    largest = all_reduce(distances.amax(-1, keepdim=True), vocabulary.group, is_maximum=True)
    distances = distances - largest
    log_total = all_reduce(distances.exp().sum(-1, keepdim=True), vocabulary.group).log_()
    return distances.sub_(log_total), largest + log_total


class _LogSoftmax(Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, vocabulary: Vocabulary) -> Tensor:
        ctx.group = vocabulary.group
        scores = log_probabilities(logits, vocabulary)[0].to(logits.dtype)
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (scores,) = ctx.saved_tensors
        gradient = in_sum_type(gradient)
        total = all_reduce(gradient.sum(-1, keepdim=True), ctx.group)
        return (gradient - in_sum_type(scores).exp() * total).to(scores.dtype), None


class _Softmax(Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, vocabulary: Vocabulary) -> Tensor:
        ctx.group = vocabulary.group
        probabilities = log_probabilities(logits, vocabulary)[0].exp_().to(logits.dtype)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        gradient, weights = in_sum_type(gradient), in_sum_type(probabilities)
        total = all_reduce((gradient * weights).sum(-1, keepdim=True), ctx.group)
        return ((gradient - total) * weights).to(probabilities.dtype), None


class _LogSumExp(Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, vocabulary: Vocabulary) -> Tensor:
        _, total = log_probabilities(logits, vocabulary)
        ctx.save_for_backward(logits, total)
        return total.squeeze(-1).to(logits.dtype)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, total = ctx.saved_tensors
        weights = (in_sum_type(logits) - total).exp_()
        return weights.mul_(gradient.unsqueeze(-1)).to(logits.dtype), None


class _Pick(Function):
    @staticmethod
    @override
    def forward(ctx: Any, scores: Tensor, tokens: Tensor, vocabulary: Vocabulary) -> Tensor:
        places, is_others = vocabulary.find(tokens)
        ctx.save_for_backward(places, is_others)
        ctx.shape = scores.shape
        picked = scores.gather(-1, places.unsqueeze(-1)).squeeze(-1)
        return all_reduce(picked.masked_fill(is_others, 0), vocabulary.group)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        places, is_others = ctx.saved_tensors
        own = gradient.masked_fill(is_others, 0)
        spread = gradient.new_zeros(ctx.shape)
        return spread.scatter_(-1, places.unsqueeze(-1), own.unsqueeze(-1)), None, None
