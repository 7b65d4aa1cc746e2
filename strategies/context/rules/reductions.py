"""Rules for what adds up over the sequence: local sums, then one all-reduce.

Sums are of fp32 at least, as one process's kernels accumulate.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from boltmesh.strategies.context.cut import ContextState, CutTensor, moved_to, part_of
from boltmesh.strategies.context.exchange import total
from boltmesh.strategies.context.rules.table import cut_rule, named


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize:
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


@cut_rule("sum", "mean")
def add_up(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum or mean over dims with the sequence among them."""
    given = named(("input", "dim", "keepdim"), args, kwargs)
    value, dims = given["input"], given.get("dim", given.get("axis"))
    if not isinstance(value, CutTensor) or given.get("out") is not None:
        return NotImplemented
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        dims = range(value.ndim)
    dims = sorted(each % value.ndim for each in ([dims] if isinstance(dims, int) else dims))
    if value.cut_dim not in dims:
        return NotImplemented
    is_mean = func.__name__ == "mean"
    asked = given.get("dtype")
    dtype = asked or value.dtype
    if is_mean and not (dtype.is_floating_point or dtype.is_complex):
        return NotImplemented  # torch's own error
    part = value.local.sum(dims, keepdim=bool(given.get("keepdim", False)),
                           dtype=_sum_dtype(dtype))  # fmt: skip
    count = prod(value.shape[each] for each in dims)
    whole = total(part, value.state.group, count)
    if is_mean:
        whole = whole / count
    is_number = dtype.is_floating_point or dtype.is_complex
    return whole.to(dtype if is_number or asked else torch.int64)


def _own(value: CutTensor, target: Tensor, dim: int) -> Tensor:
    """Return this rank's positions of a target, or of weights of its elements."""
    if isinstance(target, CutTensor):
        return moved_to(target, value.positions).local
    return part_of(target, dim, value.positions, value.state, value.num_outer, value.num_inner)


def _summed(values: Tensor, *others: Tensor, state: ContextState, num_summed: int) -> Tensor:
    """Return the sums over all ranks, by one all-reduce."""
    dtype = _sum_dtype(values.dtype)
    sums = [each.sum(dtype=dtype) for each in (values, *others)]
    return total(torch.stack(sums), state.group, num_summed)


@cut_rule("cross_entropy", "nll_loss")
def classify(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of classes: local sums of losses and of weights, and one all-reduce of both."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
             "label_smoothing")  # fmt: skip
    given = named(names, args, kwargs)
    value, target = given.pop("input"), given.pop("target")
    how = given.pop("reduction", "mean")
    legacy = given.pop("size_average", None), given.pop("reduce", None)
    if not isinstance(value, CutTensor) or legacy != (None, None):
        return NotImplemented
    weight = given.get("weight")
    smoothing = given.get("label_smoothing", 0.0)
    class_dim = 1 if value.ndim > 1 else 0
    if value.cut_dim == class_dim or isinstance(weight, CutTensor):
        return NotImplemented
    is_index = not target.is_floating_point()
    if (smoothing and weight is not None) or (not is_index and weight is not None):
        return NotImplemented  # the count is not that of the targets' weights alone
    target_dim = value.cut_dim - (is_index and value.cut_dim > 1)
    if isinstance(target, CutTensor) and (target.cut_dim, target.num_outer, target.num_inner) != (
        target_dim, value.num_outer, value.num_inner,
    ):  # fmt: skip
        return NotImplemented
    own = _own(value, target, target_dim)
    losses = func(value.local, own, reduction="none", **given)
    if how == "none":
        return value.like(losses, dim=value.cut_dim - (value.cut_dim > 1))
    if is_index:
        counted = own != given.get("ignore_index", -100)
        counts = counted if weight is None else weight[own.clamp(min=0)] * counted
    else:
        counts = torch.ones_like(losses)
    counts = counts if weight is None else counts.to(losses.dtype)
    num_losses = value.numel() // value.shape[class_dim]
    both = _summed(losses, counts, state=value.state, num_summed=num_losses)
    loss = both[0] if how == "sum" else both[0] / both[1].detach()
    return loss.to(losses.dtype)


_ELEMENTS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
             "binary_cross_entropy_with_logits", "kl_div")  # fmt: skip


@cut_rule(*_ELEMENTS)
def by_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of elements: a local sum and an all-reduce, divided by all elements."""
    given = named(("input", "target"), args[:2], kwargs)
    value, target = given.pop("input"), given.pop("target")
    how = given.pop("reduction", "mean")
    legacy = given.pop("size_average", None), given.pop("reduce", None)
    others = [each for each in given.values() if isinstance(each, Tensor)]
    if (
        not isinstance(value, CutTensor)
        or len(args) > 2
        or legacy != (None, None)
        or others
        or target.shape != value.shape
        or (
            isinstance(target, CutTensor)
            and (target.cut_dim, target.num_outer, target.num_inner)
            != (value.cut_dim, value.num_outer, value.num_inner)
        )
    ):
        return NotImplemented
    losses = func(value.local, _own(value, target, value.cut_dim), reduction="none", **given)
    if how == "none":
        return value.like(losses)
    whole = _summed(losses, state=value.state, num_summed=value.numel())[0]
    if how != "sum":
        whole = whole / (value.shape[0] if how == "batchmean" else value.numel())
    return whole.to(losses.dtype)
