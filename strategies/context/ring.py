"""Attention with keys and values passed round: no rank holds more than two blocks of them.

Softmax is accumulated block by block with the logarithms of its sums. In the backward pass the
gradients of keys are passed round with them. Scores of one block exist at a time.

Source: Ring Attention with Blockwise Transformers, Liu et al. 2023, section 3,
https://arxiv.org/abs/2310.01889
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from typing_extensions import override

from boltmesh.strategies.context.exchange import ContextGroup, send_around

_FAR = -1e30
"""Score of a key that a query does not see; finite, so that a row of only these is not NaN."""


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    allowed: Sequence[Tensor | None],
    counts: Sequence[int],
    group: ContextGroup,
) -> Tensor:
    """Attend to the keys of all ranks. Collective over the group.

    Args:
        query: ``(B, H, s, D)``.
        key: ``(B, key heads, own keys, D)``, like ``value``.
        value: The values.
        scale: Factor of the scores.
        allowed: For each rank, the keys of it that this rank's queries see: None for all, or a mask
            that broadcasts to ``(B, H, s, its keys)``.
        counts: Number of keys by rank.
        group: The ranks.

    Returns:
        ``(B, H, s, D)``, dtype of ``query``.
    """
    batch, heads, num_queries, channels = query.shape
    key_heads = key.shape[1]
    repeat = heads // key_heads
    folded = [_by_key_heads(each, heads, key_heads) for each in allowed]
    grouped = query.reshape(batch, key_heads, repeat, num_queries, channels)
    both = torch.stack([key, value])
    out: Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        grouped, both, scale, tuple(folded), tuple(counts), group
    )
    return out.reshape(batch, heads, num_queries, channels)


def _by_key_heads(mask: Tensor | None, heads: int, key_heads: int) -> Tensor | None:
    if mask is None or mask.ndim < 4:
        return mask
    mask = mask.expand(mask.shape[0], heads, *mask.shape[2:])
    return mask.reshape(mask.shape[0], key_heads, heads // key_heads, *mask.shape[2:])


def _scores(query: Tensor, key: Tensor, scale: float, allowed: Tensor | None) -> Tensor:
    scores = (query @ key.unsqueeze(2).mT).to(
        torch.promote_types(query.dtype, torch.float32)
    ) * scale
    return scores if allowed is None else scores.masked_fill(~allowed, _FAR)


def _masked(weights: Tensor, allowed: Tensor | None) -> Tensor:
    return weights if allowed is None else weights.masked_fill(~allowed, 0.0)


class _Ring(Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        query: Tensor,
        both: Tensor,
        scale: float,
        allowed: tuple[Tensor | None, ...],
        counts: tuple[int, ...],
        group: ContextGroup,
    ) -> Tensor:
        query, own = query.detach(), both.detach()
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(query.shape, dtype=wide)
        log_sum = query.new_full(query.shape[:-1], _FAR, dtype=wide)
        moving = own
        for turn in range(group.size):
            source = (group.rank - turn) % group.size
            if counts[source] and query.shape[-2]:
                scores = _scores(query, moving[0], scale, allowed[source])
                joint = torch.logaddexp(log_sum, scores.logsumexp(-1))
                weights = (scores - joint.unsqueeze(-1)).exp()
                weights = _masked(weights, allowed[source])
                out = out * (log_sum - joint).exp().unsqueeze(-1)
                out = out + weights @ moving[1].unsqueeze(2).to(wide)
                log_sum = joint
            if turn < group.size - 1:
                after = (source - 1) % group.size
                shape = (*own.shape[:3], counts[after], own.shape[4])
                moving = send_around(moving, shape, group, "ring: keys")
        ctx.saved = scale, allowed, counts, group
        ctx.save_for_backward(query, own, out, log_sum)
        return out.to(query.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scale, allowed, counts, group = ctx.saved
        query, own, out, log_sum = ctx.saved_tensors
        gradient = gradient.to(out.dtype)
        delta = (gradient * out).sum(-1, keepdim=True)
        of_query = torch.zeros_like(out)
        moving = own
        of_moving = torch.zeros(own.shape, dtype=out.dtype, device=own.device)
        for turn in range(group.size):
            source = (group.rank - turn) % group.size
            if counts[source] and query.shape[-2]:
                key, value = (each.unsqueeze(2).to(out.dtype) for each in moving)
                scores = _scores(query, moving[0], scale, allowed[source])
                weights = (scores - log_sum.unsqueeze(-1)).exp()
                weights = _masked(weights, allowed[source])
                of_scores = weights * (gradient @ value.mT - delta) * scale
                of_query = of_query + of_scores @ key
                of_key = (of_scores.mT @ query.to(out.dtype)).sum(2)
                of_moving = of_moving + torch.stack([of_key, (weights.mT @ gradient).sum(2)])
            after = (source - 1) % group.size
            shape = (*own.shape[:3], counts[after], own.shape[4])
            if turn < group.size - 1:
                moving = send_around(moving, shape, group, "ring: keys again")
            of_moving = send_around(of_moving, shape, group, "ring: gradients")
        return of_query.to(query.dtype), of_moving.to(own.dtype), None, None, None, None
