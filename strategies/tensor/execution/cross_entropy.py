"""Cross entropy of logits of which each rank has some tokens; logits are never gathered.

Ranks tell each other the largest logit of a position, then, in one message, the sum of
exponentials, the logit of the target, and with label smoothing the weighted sum of logits: three
or four numbers per position, in fp32, none in the backward pass. That one computes probabilities
anew from the logits, which exist anyway, so nothing of their size is kept.

Label smoothing counts the tokens of the whole vocabulary, and the mean divides by the weights of
targets that are not ignored, as `torch.nn.functional.cross_entropy` does.

Shapes: N positions, v tokens of this rank, V of all.

Source: Megatron-LM, Shoeybi et al. 2019, section 3, https://arxiv.org/abs/1909.08053
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from boltmesh.strategies.tensor.execution.collectives import all_reduce
from boltmesh.strategies.tensor.execution.softmax import in_sum_type, pick
from boltmesh.strategies.tensor.execution.vocabulary_part import Vocabulary


def cross_entropy(
    logits_Nv: Tensor,
    targets_N: Tensor,
    vocabulary: Vocabulary,
    *,
    weight_V: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each position, 0 where the target is ignored, and what a mean counts it.

    Collective. Both are in fp32 (fp64 for fp64) and alike on all ranks.

    Args:
        logits_Nv: This rank's tokens.
        targets_N: Tokens, alike on all ranks.
        vocabulary: Which tokens each rank has.
        weight_V: Of every token, alike on all ranks.
        ignore_index: Targets that count nothing.
        label_smoothing: Share of the target's probability that goes to all tokens alike.

    Raises:
        IndexError: A target is neither a token nor ignored.
    """
    losses = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_Nv, targets_N, vocabulary, weight_V, ignore_index, label_smoothing
    )
    return cast("Tensor", losses), counted(targets_N, weight_V, ignore_index).to(losses.dtype)


def negative_log_likelihood(
    scores_Nv: Tensor,
    targets_N: Tensor,
    vocabulary: Vocabulary,
    *,
    weight_V: Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Return the same of logarithms of probabilities. Collective.

    Raises:
        IndexError: A target is neither a token nor ignored.
    """
    weight_N = counted(targets_N, weight_V, ignore_index)
    is_ignored = targets_N == ignore_index
    picked = pick(scores_Nv, targets_N.masked_fill(is_ignored, 0), vocabulary)
    losses = -picked.masked_fill(is_ignored, 0) * weight_N
    return losses, weight_N.to(losses.dtype)


def reduced(losses_N: Tensor, counted_N: Tensor, reduction: str) -> Tensor:
    """Sum up losses as ``reduction`` says; without a target, the mean is nan as in torch."""
    if reduction == "none":
        return losses_N
    total = losses_N.sum()
    return total if reduction == "sum" else total / counted_N.sum()


def counted(targets_N: Tensor, weight_V: Tensor | None, ignore_index: int) -> Tensor:
    """Return the weight of each target, 0 of those that are ignored."""
    is_ignored = targets_N == ignore_index
    if weight_V is None:
        return (~is_ignored).float()
    weight_N = weight_V.index_select(0, targets_N.masked_fill(is_ignored, 0))
    return weight_N.masked_fill(is_ignored, 0)


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
        values = in_sum_type(logits)
        own_total = torch.logsumexp(values, -1)
        largest = all_reduce(own_total, group, is_maximum=True)
        of_target = values.gather(-1, places.unsqueeze(-1)).squeeze(-1) - largest
        sums = [(own_total - largest).exp(), of_target.masked_fill(is_others, 0)]
        own_weight = None if weight is None else vocabulary.own(weight, 0).to(values.dtype)
        if smoothing:
            # Taken after the largest is away, so that these many terms lose no digits.
            distances = values - largest.unsqueeze(-1)
            sums.append(distances.sum(-1) if own_weight is None else distances @ own_weight)
        sums = list(all_reduce(torch.stack(sums), group))
        log_total = sums[0].log()
        weight_N = counted(targets, weight, ignore_index).to(values.dtype)
        all_weight = vocabulary.size if weight is None else weight.sum().to(values.dtype)
        losses = (1 - label_smoothing) * weight_N * (log_total - sums[1])
        if smoothing:
            losses = losses + smoothing * (all_weight * log_total - sums[2])
        ctx.save_for_backward(
            logits, places, is_others, is_ignored, log_total + largest, weight_N, own_weight
        )
        ctx.label_smoothing, ctx.smoothing, ctx.all_weight = label_smoothing, smoothing, all_weight
        return losses.masked_fill(is_ignored, 0)

    @staticmethod
    @override
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        logits, places, is_others, is_ignored, normalizer, weight_N, own_weight = ctx.saved_tensors
        # A batch of which all is ignored has a mean of nan, and still no gradient.
        gradient_N = gradient_N.masked_fill(is_ignored, 0)
        of_target = (1 - ctx.label_smoothing) * weight_N * gradient_N
        of_all = of_target + ctx.smoothing * ctx.all_weight * gradient_N
        gradient = (in_sum_type(logits) - normalizer.unsqueeze(-1)).exp_()
        gradient.mul_(of_all.unsqueeze(-1))
        if ctx.smoothing:
            share = (ctx.smoothing * gradient_N).unsqueeze(-1)
            gradient.sub_(share if own_weight is None else share * own_weight)
        gradient.scatter_add_(
            -1, places.unsqueeze(-1), -of_target.masked_fill(is_others, 0).unsqueeze(-1)
        )
        return gradient.to(logits.dtype), None, None, None, None, None
