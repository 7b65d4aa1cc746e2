"""Reductions over a vocabulary that is divided over ranks: sums, softmax, losses.

Logits are not gathered; ranks exchange a few numbers per position. For a softmax these are the
largest logit and the sum of the exponentials, both in fp32 (fp64 for fp64), whatever the dtype of
the logits.

For cross entropy the ranks exchange the largest logit of a position, then, in one message, the sum
of exponentials, the logit of the target, and with label smoothing the weighted sum of logits: three
or four numbers per position, in fp32, and none in the backward pass. That recomputes probabilities
from the logits, which exist anyway, so nothing of their size is stored. Label smoothing counts the
tokens of the whole vocabulary, and the mean divides by the weights of the targets that are not
ignored, as in `torch.nn.functional.cross_entropy`.

The second half has the rules for torch's functions on a `VocabularyTensor`.

Shapes: softmax takes ``(..., v)``, v tokens of this rank after any dimensions of positions. For
cross entropy with N positions and V tokens of all ranks, logits and scores are ``(N, v)``, targets
``(N,)``, weights of tokens ``(V,)``.

Source: Megatron-LM, Shoeybi et al. 2019, section 3, https://arxiv.org/abs/1909.08053
"""

from collections.abc import Callable
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from boltmesh.strategies.tensor.runtime.collectives import all_gather, all_reduce, reduce_sum
from boltmesh.strategies.tensor.runtime.vocab_tensor import (
    NO_RULE,
    Vocabulary,
    VocabularyTensor,
    rule_for,
    unwrap,
    wrap,
)


def pick(scores: Tensor, tokens: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the score of one token per position, replicated. Collective.

    Args:
        scores: Scores of this rank's tokens, ``(..., v)``.
        tokens: Indices in the vocabulary, ``(...)``, replicated.
        vocabulary: The tokens of each rank.

    Returns:
        Shape ``(...)``, dtype of ``scores``.

    Raises:
        IndexError: A token is not in the vocabulary.
    """
    return cast("Tensor", _Pick.apply(scores, tokens, vocabulary))  # type: ignore[no-untyped-call]


def in_sum_type(values: Tensor) -> Tensor:
    """Cast to the dtype of sums over a vocabulary: fp32, or fp64 for fp64."""
    return values if values.dtype == torch.float64 else values.float()


def log_probabilities(logits: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return log probabilities ``(..., v)``, and what was subtracted, ``(..., 1)``. Collective.

    In fp32 (fp64 for fp64), without autograd. NaN if all logits of a position are -inf or one is
    inf, as in torch.
    """
    distances = in_sum_type(logits.detach())
    largest = all_reduce(distances.amax(-1, keepdim=True), vocabulary.group, is_maximum=True)
    distances = distances - largest
    log_total = all_reduce(distances.exp().sum(-1, keepdim=True), vocabulary.group).log_()
    return distances.sub_(log_total), largest + log_total


class _LogSoftmax(Function):
    """Log probabilities of this rank's tokens, ``(..., v)`` like the logits. Collective."""

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
    """Probabilities of this rank's tokens, ``(..., v)`` like the logits. Collective."""

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
    """The log of the sum of the exponentials of all tokens, ``(...)``. Collective."""

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


def counted(targets: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the weight of each target, ``(N,)``; 0 if it is ignored."""
    is_ignored = targets == ignore_index
    if weight is None:
        return (~is_ignored).float()
    weights = weight.index_select(0, targets.masked_fill(is_ignored, 0))
    return weights.masked_fill(is_ignored, 0)


class _CrossEntropy(Function):
    """Loss of each position, ``(N,)``, 0 if ignored, in fp32 (fp64 for fp64). Collective.

    Targets, weights of classes and the result are replicated. Raises IndexError if a target is
    neither a token nor ignored.
    """

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
        # The mean of a batch in which everything is ignored is NaN, and still has no gradient.
        gradient_of_loss = gradient_of_loss.masked_fill(is_ignored, 0)
        of_target = (1 - ctx.label_smoothing) * weights * gradient_of_loss
        of_all = of_target + ctx.smoothing * ctx.all_weight * gradient_of_loss
        # Subtracted separately: their sum would round away the rest of a nearly certain token.
        gradient = in_sum_type(logits) - largest.unsqueeze(-1)
        gradient.sub_(log_total.unsqueeze(-1)).exp_().mul_(of_all.unsqueeze(-1))
        if ctx.smoothing:
            share = (ctx.smoothing * gradient_of_loss).unsqueeze(-1)
            gradient.sub_(share if own_weight is None else share * own_weight)
        gradient.scatter_add_(
            -1, places.unsqueeze(-1), -of_target.masked_fill(is_others, 0).unsqueeze(-1)
        )
        return gradient.to(logits.dtype), None, None, None, None, None


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
    """Sum or average over dims that may include the divided one."""
    if not isinstance(divided, VocabularyTensor) or isinstance(dim, torch.dtype):
        return NO_RULE
    dims = _dims(divided, dim)
    kind = func(divided.local.detach().new_zeros(1), dtype=dtype).dtype
    local = unwrap(divided)
    if kind.is_floating_point or kind.is_complex:
        # Parts of a sum are not rounded to 16 bits before they are summed.
        local = in_sum_type(local.to(kind) if dtype is not None else local)
    if divided.divided_dim not in dims:
        left = divided.divided_dim - (0 if keepdim else sum(d < divided.divided_dim for d in dims))
        return wrap(func(local, dims, keepdim).to(kind), divided.vocabulary, left)
    total = reduce_sum(local.sum(dims, keepdim), divided.vocabulary.group)
    if func.__name__ == "mean":
        total = total / prod(divided.shape[each] for each in dims)
    return total.to(kind)


@rule_for("logsumexp")
def logsumexp(func: Callable[..., Any], divided: Any, dim: _Dims, keepdim: bool = False) -> Any:
    """Return the logarithm of the divisor of a softmax, for example for a z-loss."""
    if not isinstance(divided, VocabularyTensor) or _dims(divided, dim) != (divided.divided_dim,):
        return NO_RULE
    last = unwrap(divided).movedim(divided.divided_dim, -1)
    total: Tensor = _LogSumExp.apply(last, divided.vocabulary)  # type: ignore[no-untyped-call]
    return total.unsqueeze(divided.divided_dim) if keepdim else total


@rule_for("argmax")
def argmax(
    func: Callable[..., Any], divided: Any, dim: int | None = None, keepdim: bool = False
) -> Any:
    """Return the token with the highest score; the first of several, as in torch."""
    if not _is_over_tokens(divided, dim):
        return NO_RULE
    return _best_token(divided, keepdim=keepdim)


@rule_for("max")
def maximum(
    func: Callable[..., Any], divided: Any, dim: int | Tensor | None = None, keepdim: bool = False
) -> Any:
    """Return the highest score and its token."""
    if not _is_over_tokens(divided, dim):
        return NO_RULE
    tokens = _best_token(divided, keepdim=False)
    last = unwrap(divided).movedim(divided.divided_dim, -1)
    values = pick(last, tokens, divided.vocabulary)
    if keepdim:
        values = values.unsqueeze(divided.divided_dim)
        tokens = tokens.unsqueeze(divided.divided_dim)
    return torch.return_types.max((values, tokens))


@rule_for("gather take_along_dim")
def gather_tokens(
    func: Callable[..., Any], divided: Any, dim: Any, index: Any, *, sparse_grad: bool = False
) -> Any:
    """Return the scores of one token per position, such as the log probabilities of targets."""
    if func.__name__ == "take_along_dim":
        dim, index = index, dim
    if not isinstance(index, Tensor) or not _is_over_tokens(divided, dim):
        return NO_RULE
    of_one = [1 if d == divided.divided_dim else size for d, size in enumerate(divided.shape)]
    if list(index.shape) != of_one:
        return NO_RULE
    last = unwrap(divided).movedim(divided.divided_dim, -1)
    picked = pick(last, index.squeeze(divided.divided_dim), divided.vocabulary)
    return picked.unsqueeze(divided.divided_dim)


def _best_token(divided: VocabularyTensor, *, keepdim: bool) -> Tensor:
    vocabulary = divided.vocabulary
    last = divided.local.detach().movedim(divided.divided_dim, -1)
    values, places = last.max(-1)
    # Two messages, because tokens and scores have different dtypes.
    all_values = all_gather(values.unsqueeze(0), vocabulary.group, 0)
    all_tokens = all_gather((places + vocabulary.start).unsqueeze(0), vocabulary.group, 0)
    tokens = all_tokens.gather(0, all_values.argmax(0, keepdim=True)).squeeze(0)
    return tokens.unsqueeze(divided.divided_dim) if keepdim else tokens


def _is_over_tokens(divided: Any, dim: Any) -> bool:
    """Whether ``dim`` is the divided dim of a divided tensor."""
    return (
        isinstance(divided, VocabularyTensor)
        and isinstance(dim, int)
        and dim % divided.dim() == divided.divided_dim
    )


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
    """Compute the loss if targets are tokens; targets that are probabilities need whole logits."""
    if size_average is not None or reduce is not None or not _fits(logits, target, weight):
        return NO_RULE
    targets = target.reshape(-1)
    losses = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        _rows(logits), targets, logits.vocabulary, weight, ignore_index, label_smoothing
    )
    weights = counted(targets, weight, ignore_index)
    return _reduced(losses, weights, reduction, target, _result_type(F.cross_entropy, logits))


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
    """Compute the loss from log probabilities."""
    if size_average is not None or reduce is not None or not _fits(scores, target, weight):
        return NO_RULE
    targets = target.reshape(-1)
    is_ignored = targets == ignore_index
    weights = counted(targets, weight, ignore_index)
    picked = pick(_rows(scores), targets.masked_fill(is_ignored, 0), scores.vocabulary)
    losses = -picked.masked_fill(is_ignored, 0) * weights
    return _reduced(losses, weights, reduction, target, _result_type(F.nll_loss, scores))


@rule_for("log_softmax softmax")
def normalize(
    func: Callable[..., Any],
    logits: Any,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Any:
    """Normalise over the tokens, or over another dim without communication."""
    if not isinstance(logits, VocabularyTensor) or dim is None or not isinstance(_stacklevel, int):
        return NO_RULE
    local = unwrap(logits)
    if dim % logits.dim() != logits.divided_dim:
        return wrap(func(local, dim, dtype=dtype), logits.vocabulary, logits.divided_dim)
    # The dtype as torch computes it, which autocast may change.
    kind = func(local.detach().new_zeros(1), 0, dtype=dtype).dtype
    over: type[Function] = _Softmax if func.__name__ == "softmax" else _LogSoftmax
    last = local.movedim(logits.divided_dim, -1).to(kind)
    result: Tensor = over.apply(last, logits.vocabulary)  # type: ignore[no-untyped-call]
    return wrap(result.movedim(-1, logits.divided_dim), logits.vocabulary, logits.divided_dim)


def _fits(logits: Any, target: Any, weight: Any) -> bool:
    """Whether the classes of a loss are the divided tokens, and its targets are among them."""
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
    """Return this rank's part as ``(N, v)``, one row per position."""
    return unwrap(logits).movedim(logits.divided_dim, -1).reshape(-1, logits.vocabulary.length)


def _result_type(loss: Callable[..., Tensor], logits: VocabularyTensor) -> torch.dtype:
    """Return the dtype of torch's own loss for such logits, which autocast may change."""
    tiny = logits.local.detach().new_zeros(1, 1)
    return loss(tiny, torch.zeros(1, dtype=torch.long, device=tiny.device)).dtype


def _reduced(
    losses: Tensor, weights: Tensor, reduction: str, target: Tensor, kind: torch.dtype
) -> Any:
    """Reduce losses and the weights of targets, ``(N,)``; without any the mean is NaN."""
    if reduction == "none":
        return losses.to(kind).reshape(target.shape)
    if reduction == "sum":
        return losses.sum().to(kind)
    if reduction != "mean":
        return NO_RULE
    return (losses.sum() / weights.to(losses.dtype).sum()).to(kind)
