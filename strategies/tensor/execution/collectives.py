"""What ranks of the tensor axis tell each other in a forward pass, and in its backward.

A value is *alike* on all ranks, *divided* along a dimension, or *partial*: the sum over the ranks
is what is meant. Each function here changes one into another; its backward is another one of them,
so gradients of gradients come out right too. The gradient of a value that is alike is alike; that
of one each rank uses for its own part is partial.

==================  ===============================  =====================  ==================
function            forward                          backward               Megatron's name
==================  ===============================  =====================  ==================
`reduce_gradient`   alike, kept                      partial into alike     f
`reduce_sum`        partial into alike               alike, kept            g
`gather_parts`      divided into alike               alike, own part kept
`take_part`         alike, own part kept             divided into alike
`gather_sequence`   divided into alike, used by all  partial into divided   g of sequences
                    ranks for their own parts
`scatter_sum`       partial into divided             divided into alike     reverse of that
==================  ===============================  =====================  ==================

All are collective over the group: every rank calls them, in the same order. A group of one rank
communicates nothing.

Source: Megatron-LM, Shoeybi et al. 2019, section 3, https://arxiv.org/abs/1909.08053; for
sequences Korthikanti et al. 2022, section 4.2, https://arxiv.org/abs/2205.05198
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from typing_extensions import override

from boltmesh.strategies.tensor.execution.group import TensorGroup
from boltmesh.strategies.torch_compat import all_gather_single, reduce_scatter_single


def reduce_gradient(value: Tensor, group: TensorGroup) -> Tensor:
    """Give a value that is alike to computations that differ by rank; gradients are summed."""
    return value if group.size == 1 else cast("Tensor", _ReduceGradient.apply(value, group))  # type: ignore[no-untyped-call]


def shared_gradient(value: Tensor, group: TensorGroup) -> Tensor:
    """Keep a value whose gradient is alike; each rank passes on an equal part of it. Local."""
    return value if group.size == 1 else cast("Tensor", _SharedGradient.apply(value, group))  # type: ignore[no-untyped-call]


def reduce_sum(part: Tensor, group: TensorGroup) -> Tensor:
    """Add up what the ranks have. Leaves ``part`` as it is."""
    return part if group.size == 1 else cast("Tensor", _ReduceSum.apply(part, group))  # type: ignore[no-untyped-call]


def gather_parts(part: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Join the parts of all ranks along ``dim``, for computations that are alike on all."""
    return part if group.size == 1 else cast("Tensor", _GatherParts.apply(part, group, dim))  # type: ignore[no-untyped-call]


def take_part(value: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Keep this rank's part of a value that is alike; ``dim`` has to divide by the ranks."""
    return value if group.size == 1 else cast("Tensor", _TakePart.apply(value, group, dim))  # type: ignore[no-untyped-call]


def gather_sequence(part: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Join the parts of all ranks along ``dim``, for computations that differ by rank."""
    return part if group.size == 1 else cast("Tensor", _GatherSequence.apply(part, group, dim))  # type: ignore[no-untyped-call]


def scatter_sum(part: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Add up what the ranks have and keep this rank's part along ``dim``."""
    return part if group.size == 1 else cast("Tensor", _ScatterSum.apply(part, group, dim))  # type: ignore[no-untyped-call]


def all_reduce(value: Tensor, group: TensorGroup, *, is_maximum: bool = False) -> Tensor:
    """Return the sum, or the largest, over the ranks, without a gradient. A new tensor."""
    total = value.detach().clone(memory_format=torch.contiguous_format)
    if group.size > 1:
        operator = dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM
        dist.all_reduce(total, operator, group=group.process_group)
    return total


def all_gather(part: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return the parts of all ranks joined along ``dim``, without a gradient."""
    part = part.detach()
    if group.size == 1:
        return part
    along_first = part.movedim(dim, 0).contiguous()
    joined = along_first.new_empty(group.size * along_first.shape[0], *along_first.shape[1:])
    all_gather_single(joined, along_first, group=group.process_group)
    return joined.movedim(0, dim).contiguous()


def reduce_scatter(value: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return this rank's part along ``dim`` of the sum over the ranks, without a gradient."""
    value = value.detach()
    if group.size == 1:
        return value
    along_first = value.movedim(dim, 0).contiguous()
    own = along_first.new_empty(along_first.shape[0] // group.size, *along_first.shape[1:])
    reduce_scatter_single(own, along_first, group=group.process_group)
    return own.movedim(0, dim).contiguous()


def own_part(value: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return a view of this rank's part along ``dim``."""
    length = value.shape[dim] // group.size
    return value.narrow(dim, group.rank * length, length)


class _ReduceGradient(Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_sum(gradient, ctx.group), None


class _SharedGradient(Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.group.size, None


class _ReduceSum(Function):
    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return all_reduce(part, group)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_gradient(gradient, ctx.group), None


class _GatherParts(Function):
    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(part, group, dim)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return take_part(gradient, ctx.group, ctx.dim), None, None


class _TakePart(Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return own_part(value, group, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather_parts(gradient, ctx.group, ctx.dim), None, None


class _GatherSequence(Function):
    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(part, group, dim)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return scatter_sum(gradient, ctx.group, ctx.dim), None, None


class _ScatterSum(Function):
    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(part, group, dim)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather_sequence(gradient, ctx.group, ctx.dim), None, None
