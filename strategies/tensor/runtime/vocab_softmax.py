"""Softmax and cross entropy over a vocabulary of which each rank has some tokens.

Logits are never gathered. Two numbers per position are all that ranks exchange for a softmax: the
largest logit and the sum of the exponentials. Both are kept in fp32 (fp64 for fp64), whatever the
type of the logits.

For cross entropy the ranks exchange the largest logit of a position, then, in one message, the sum
of exponentials, the logit of the target, and with label smoothing the weighted sum of logits: three
or four numbers per position, in fp32, none in the backward pass. That one computes probabilities
again from the logits, which exist anyway, so nothing of their size is kept. Label smoothing counts
the tokens of the whole vocabulary, and the mean divides by the weights of targets that are not
ignored, as `torch.nn.functional.cross_entropy` does.

Shapes: softmax takes ``(..., v)``, v tokens of this rank after any dimensions of positions. For
cross entropy with N positions and V tokens of all ranks, logits and scores are ``(N, v)``, targets
``(N,)``, weights of tokens ``(V,)``.

Source: Megatron-LM, Shoeybi et al. 2019, section 3, https://arxiv.org/abs/1909.08053
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from boltmesh.strategies.tensor.runtime.collectives import all_reduce
from boltmesh.strategies.tensor.runtime.vocab_tensor import Vocabulary


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


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each position, 0 where the target is ignored, and what a mean counts it.

    Collective. Both are in fp32 (fp64 for fp64) and alike on all ranks.

    Args:
        logits: Of this rank's tokens.
        targets: Tokens or ``ignore_index``, alike on all ranks.
        vocabulary: Which tokens each rank has.
        weight: Of every token, alike on all ranks.
        ignore_index: Targets that count nothing.
        label_smoothing: Share of the target's probability that goes to all tokens alike.

    Raises:
        IndexError: A target is neither a token nor ignored.
    """
    losses = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, vocabulary, weight, ignore_index, label_smoothing
    )
    return cast("Tensor", losses), counted(targets, weight, ignore_index).to(losses.dtype)


def negative_log_likelihood(
    scores: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Return the same of logarithms of probabilities. Collective.

    Raises:
        IndexError: A target is neither a token nor ignored.
    """
    weights = counted(targets, weight, ignore_index)
    is_ignored = targets == ignore_index
    picked = pick(scores, targets.masked_fill(is_ignored, 0), vocabulary)
    losses = -picked.masked_fill(is_ignored, 0) * weights
    return losses, weights.to(losses.dtype)


def reduced(losses: Tensor, counts: Tensor, reduction: str) -> Tensor:
    """Sum up losses as ``reduction`` says; without a target, the mean is nan as in torch."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counts.sum()


def counted(targets: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the weight of each target, 0 of those that are ignored."""
    is_ignored = targets == ignore_index
    if weight is None:
        return (~is_ignored).float()
    weights = weight.index_select(0, targets.masked_fill(is_ignored, 0))
    return weights.masked_fill(is_ignored, 0)


class _CrossEntropy(Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocabulary: Vocabulary,
        weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
    ) -> Tensor:
        group, smoothing = vocabulary.group, label_smoothing / vocabulary.size
        is_ignored = targets == ignore_index
        places, is_others = vocabulary.find(targets.masked_fill(is_ignored, 0))
        own_weight = None if weight is None else vocabulary.own(weight, 0)
        distances = in_sum_type(logits)  # (N, v), below the largest logit of a position
        largest = all_reduce(distances.amax(-1), group, is_maximum=True)  # (N,)
        distances = distances - largest.unsqueeze(-1)
        of_target = distances.gather(-1, places.unsqueeze(-1)).squeeze(-1)
        sums = [of_target.masked_fill(is_others, 0)]
        if smoothing:
            own_weight = None if own_weight is None else own_weight.to(distances.dtype)
            sums.append(distances.sum(-1) if own_weight is None else distances @ own_weight)
        sums.append(distances.exp_().sum(-1))
        of_target, *of_all, total = all_reduce(torch.stack(sums), group)
        log_total = total.log()
        weights = counted(targets, weight, ignore_index).to(log_total.dtype)
        all_weight = vocabulary.size if weight is None else weight.sum().to(log_total.dtype)
        losses = (1 - label_smoothing) * weights * (log_total - of_target)
        if smoothing:
            losses = losses + smoothing * (all_weight * log_total - of_all[0])
        ctx.save_for_backward(
            logits, places, is_others, is_ignored, largest, log_total, weights, own_weight
        )
        ctx.label_smoothing, ctx.smoothing, ctx.all_weight = label_smoothing, smoothing, all_weight
        return cast("Tensor", losses.masked_fill(is_ignored, 0))

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient_of_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, places, is_others, is_ignored, largest, log_total, weights, own_weight = (
            ctx.saved_tensors
        )
        # A batch of which all is ignored has a mean of nan, and still no gradient.
        gradient_of_loss = gradient_of_loss.masked_fill(is_ignored, 0)
        of_target = (1 - ctx.label_smoothing) * weights * gradient_of_loss
        of_all = of_target + ctx.smoothing * ctx.all_weight * gradient_of_loss
        # One after the other: their sum would round away what little is left of a sure token.
        gradient = in_sum_type(logits) - largest.unsqueeze(-1)
        gradient.sub_(log_total.unsqueeze(-1)).exp_().mul_(of_all.unsqueeze(-1))
        if ctx.smoothing:
            share = (ctx.smoothing * gradient_of_loss).unsqueeze(-1)
            gradient.sub_(share if own_weight is None else share * own_weight)
        gradient.scatter_add_(
            -1, places.unsqueeze(-1), -of_target.masked_fill(is_others, 0).unsqueeze(-1)
        )
        return gradient.to(logits.dtype), None, None, None, None, None
