"""Softmax and its relatives over a vocabulary of which each rank has some tokens.

Two numbers per position are all that ranks tell each other: the largest logit and the sum of the
exponentials. Both are kept in fp32 (fp64 for fp64), whatever the type of the logits.

Shapes: B positions in any number of dimensions, v tokens of this rank; tokens come last.

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


def log_softmax(logits_Bv: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return this rank's part of the logarithms of the probabilities. Collective."""
    return cast("Tensor", _LogSoftmax.apply(logits_Bv, vocabulary))  # type: ignore[no-untyped-call]


def softmax(logits_Bv: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return this rank's part of the probabilities. Collective."""
    return cast("Tensor", _Softmax.apply(logits_Bv, vocabulary))  # type: ignore[no-untyped-call]


def log_sum_exp(logits_Bv: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the logarithm of the sum of the exponentials of all tokens. Collective."""
    return cast("Tensor", _LogSumExp.apply(logits_Bv, vocabulary))  # type: ignore[no-untyped-call]


def pick(scores_Bv: Tensor, tokens_B: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the score of one token per position, alike on all ranks. Collective.

    Raises:
        IndexError: A token is not of the vocabulary.
    """
    return cast("Tensor", _Pick.apply(scores_Bv, tokens_B, vocabulary))  # type: ignore[no-untyped-call]


def in_sum_type(values: Tensor) -> Tensor:
    """Return values in the type that sums over a vocabulary are taken in."""
    return values if values.dtype == torch.float64 else values.float()


def normalizer(logits_Bv: Tensor, group_of: Vocabulary) -> Tensor:
    """Return the logarithm of the sum of exponentials, without a gradient, in fp32. Collective."""
    own = torch.logsumexp(in_sum_type(logits_Bv.detach()), -1)
    largest = all_reduce(own, group_of.group, is_maximum=True)
    # Where all logits of a position are -inf, or one is inf, this is nan, as it is in torch.
    return all_reduce((own - largest).exp_(), group_of.group).log_().add_(largest)


class _LogSoftmax(Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits_Bv: Tensor, vocabulary: Vocabulary) -> Tensor:
        ctx.group = vocabulary.group
        scores = in_sum_type(logits_Bv) - normalizer(logits_Bv, vocabulary).unsqueeze(-1)
        scores = scores.to(logits_Bv.dtype)
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    @override
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (scores,) = ctx.saved_tensors
        gradient = in_sum_type(gradient)
        total = all_reduce(gradient.sum(-1, keepdim=True), ctx.group)
        return (gradient - in_sum_type(scores).exp() * total).to(scores.dtype), None


class _Softmax(Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits_Bv: Tensor, vocabulary: Vocabulary) -> Tensor:
        ctx.group = vocabulary.group
        scores = in_sum_type(logits_Bv) - normalizer(logits_Bv, vocabulary).unsqueeze(-1)
        probabilities = scores.exp_().to(logits_Bv.dtype)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    @override
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        gradient, weights = in_sum_type(gradient), in_sum_type(probabilities)
        total = all_reduce((gradient * weights).sum(-1, keepdim=True), ctx.group)
        return ((gradient - total) * weights).to(probabilities.dtype), None


class _LogSumExp(Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits_Bv: Tensor, vocabulary: Vocabulary) -> Tensor:
        total_B = normalizer(logits_Bv, vocabulary)
        ctx.save_for_backward(logits_Bv, total_B)
        return total_B.to(logits_Bv.dtype)

    @staticmethod
    @override
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient_B: Tensor) -> tuple[Tensor, None]:
        logits, total_B = ctx.saved_tensors
        weights = (in_sum_type(logits) - total_B.unsqueeze(-1)).exp_()
        return weights.mul_(gradient_B.unsqueeze(-1)).to(logits.dtype), None


class _Pick(Function):
    @staticmethod
    @override
    def forward(ctx: Any, scores_Bv: Tensor, tokens_B: Tensor, vocabulary: Vocabulary) -> Tensor:
        places, is_others = vocabulary.find(tokens_B)
        ctx.save_for_backward(places, is_others)
        ctx.shape = scores_Bv.shape
        picked = scores_Bv.gather(-1, places.unsqueeze(-1)).squeeze(-1)
        return all_reduce(picked.masked_fill(is_others, 0), vocabulary.group)

    @staticmethod
    @override
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient_B: Tensor) -> tuple[Tensor, None, None]:
        places, is_others = ctx.saved_tensors
        own = gradient_B.masked_fill(is_others, 0)
        spread = gradient_B.new_zeros(ctx.shape)
        return spread.scatter_(-1, places.unsqueeze(-1), own.unsqueeze(-1)), None, None
