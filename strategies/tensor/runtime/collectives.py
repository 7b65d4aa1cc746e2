"""Collectives of the tensor axis, differentiable.

``TensorGroup`` is the ranks that share every layer, and the position of this rank among them.

A value is *replicated* (equal on all ranks), *divided* along a dim, or *partial* (its value is the
sum over the ranks), as in DTensor. Each function below changes one into another, and its backward
is another of these functions, so higher derivatives are right, too. The gradient of a replicated
value is replicated, unless each rank uses the value for a part of its own: then it is partial.

==================  ===============================  =======================  ================
function            forward                          backward                 Megatron's name
==================  ===============================  =======================  ================
`reduce_gradient`   replicated, unchanged            partial to replicated    f
`reduce_sum`        partial to replicated            replicated, unchanged    g
`gather_parts`      divided to replicated            replicated to own part
`take_part`         replicated to own part           divided to replicated
`gather_sequence`   divided to whole, used by each   partial to divided       g of sequences
                    rank for a part of its own
`scatter_sum`       partial to divided               divided to replicated    reverse of that
==================  ===============================  =======================  ================

All are collective over the group: every rank calls them, in the same order. A group of one rank
does not communicate. Values have any shape and dtype, which results keep, except that a whole of N
elements along ``dim`` has parts of ``N / ranks``; N must be a multiple of the number of ranks.

Source: Megatron-LM, Shoeybi et al. 2019, section 3, https://arxiv.org/abs/1909.08053; for
sequences Korthikanti et al. 2022, section 4.2, https://arxiv.org/abs/2205.05198
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from typing_extensions import Self, override

from boltmesh.strategies.torch_compat.autograd import is_wanted, linear_map
from boltmesh.strategies.torch_compat.communication import (
    all_gather_single,
    compiled_all_gather,
    compiled_all_reduce,
    compiled_reduce_scatter,
    reduce_scatter_single,
)
from boltmesh.strategies.torch_compat.tensors import as_no_view


@dataclass(frozen=True)
class TensorGroup:
    """The ranks of one tensor group.

    Wrappers on a model's modules reference it. A deep copy of such a model shares it, since a
    process group cannot be copied.
    """

    process_group: ProcessGroup
    device: torch.device
    """Device for computation and communication."""

    @cached_property
    def size(self) -> int:
        """Number of ranks that share a layer."""
        return self.process_group.size()

    @cached_property
    def rank(self) -> int:
        """Rank of this process within the group."""
        return self.process_group.rank()

    @property
    def name(self) -> str:
        """Name of the process group, by which compiled code finds it."""
        return self.process_group.group_name

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Mesh of DTensors between column and row modules. Made without communication.

        DTensor treats meshes of equal ranks and names as equal: without a name of its own, a mesh
        from verification, whose group is destroyed, would be returned by its caches in the run.
        """
        return DeviceMesh.from_group(
            self.process_group, self.device.type, mesh_dim_names=(self.name,)
        )

    @contextmanager
    def counted_by(self, process_group: ProcessGroup) -> Iterator[None]:
        """Context in which another group replaces this one, to count what a step communicates.

        DTensors between column and row modules stay on the mesh of this group.
        """
        self._fix_mesh()
        own = self.process_group
        object.__setattr__(self, "process_group", process_group)
        try:
            yield
        finally:
            object.__setattr__(self, "process_group", own)

    def _fix_mesh(self) -> None:
        """Build the mesh before the group is replaced."""
        _ = self.mesh

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self


def reduce_gradient(value: Tensor, group: TensorGroup) -> Tensor:
    """Return a replicated value for computations that differ by rank; sums the gradient."""
    return differentiable(group, value, _kept, lambda gradient: reduce_sum(gradient, group))


def shared_gradient(value: Tensor, group: TensorGroup) -> Tensor:
    """Return a value that passes ``1 / ranks`` of its replicated gradient back. Local."""
    return differentiable(group, value, _kept, lambda gradient: gradient / group.size)


def reduce_gradient_beside(
    value: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup
) -> tuple[Tensor, Tensor] | None:
    """``reduce_gradient`` and ``F.linear`` of its result; see [Note: A sum beside a product].

    Args:
        value: Replicated input, ``(..., E)``.
        weight: This rank's outputs, ``(n, E)``.
        bias: ``(n,)`` or None.
        group: The ranks.

    Returns:
        The value for further computations that differ by rank, and the product ``(..., n)``; None
        if the sum cannot run beside the product.
    """
    is_plain = type(value) is Tensor and value.requires_grad and weight.requires_grad
    if group.size == 1 or not is_plain or not torch.is_grad_enabled() or is_compiling():
        return None
    kind, dtype = value.device.type, value.dtype
    if torch.is_autocast_enabled(kind):
        if torch.is_autocast_cache_enabled() or dtype is torch.float64:
            return None  # autocast caches the cast weight, which all microbatches share
        dtype = torch.get_autocast_dtype(kind)
    beside = _SumBeside(group)
    awaited = _AwaitSum.apply(value, beside)  # type: ignore[no-untyped-call]
    weight = weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    handle = _WeightGradient.apply(weight, bias, beside)  # type: ignore[no-untyped-call]
    given = _StartSum.apply(awaited, beside)  # type: ignore[no-untyped-call]
    with torch.autocast(kind, enabled=False):
        product = _InputGradient.apply(given.to(dtype), handle, weight, bias, beside)  # type: ignore[no-untyped-call]
    return given, product


class _SumBeside:
    """State shared by the four nodes of one product.

    [Note: A sum beside a product]
    The gradient of a divided layer's input is summed over the ranks. The gradient of its weight
    need not wait for that (Megatron-LM computes it while the sum runs). Autograd runs nodes that
    are ready in the reverse order of the forward pass. So the forward pass makes four nodes, in
    the order await, weight's gradient, start, product. In the backward pass the product computes
    only the gradient of its input, the sum starts once the other layers that take the value have
    added theirs, the weight's gradient is computed, and the sum is awaited. The results do not
    change.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.work: dist.Work | None = None
        self.operands: tuple[Tensor, Tensor] | None = None
        """Gradient of the product ``(..., n)`` and its input ``(..., E)``."""


class _Unchanged(Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, beside: _SumBeside) -> Tensor:
        ctx.beside = beside
        return _kept(value)


class _AwaitSum(_Unchanged):
    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        work, ctx.beside.work = ctx.beside.work, None
        if work is not None:
            work.wait()
        return gradient, None


class _WeightGradient(Function):
    @staticmethod
    @override
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, beside: _SumBeside) -> Tensor:
        ctx.beside, ctx.has_bias = beside, bias is not None and bias.requires_grad
        return weight.new_empty(0)

    @staticmethod
    @override
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor | None, None]:
        operands, ctx.beside.operands = ctx.beside.operands, None
        assert operands is not None
        gradient, value = (each.reshape(-1, each.shape[-1]) for each in operands)
        return gradient.t() @ value, gradient.sum(0) if ctx.has_bias else None, None


class _StartSum(_Unchanged):
    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        group = ctx.beside.group
        if torch.is_grad_enabled():  # for second derivatives
            return reduce_sum(gradient, group), None
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.beside.work = dist.all_reduce(total, group=group.process_group, async_op=True)
        return total, None


class _InputGradient(Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        value: Tensor,
        handle: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        beside: _SumBeside,
    ) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.beside = beside
        # With more than two dims and a bias it is a view, which could not be written in place.
        return as_no_view(F.linear(value, weight, bias))

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        value, weight = ctx.saved_tensors
        ctx.beside.operands = gradient, value
        of_value = gradient @ weight if is_wanted(ctx.next_functions[0][0]) else None
        return of_value, gradient.new_zeros(0), None, None, None


def reduce_sum(part: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum of partial values over the ranks, of equal shape. Collective."""
    return differentiable(
        group,
        part,
        lambda part: all_reduce(part, group),
        lambda gradient: reduce_gradient(gradient, group),
    )


def gather_parts(part: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Join the equal parts of all ranks along ``dim``, for replicated computations. Collective."""
    return differentiable(
        group,
        part,
        lambda part: all_gather(part, group, dim),
        lambda gradient: take_part(gradient, group, dim),
    )


def take_part(value: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return this rank's part of a replicated value along ``dim``, 1 / R of it. Local."""

    def own_part(value: Tensor) -> Tensor:
        length = value.shape[dim] // group.size
        own = value.narrow(dim, group.rank * length, length)
        return own.clone(memory_format=torch.contiguous_format)

    return differentiable(
        group,
        value,
        own_part,
        lambda gradient: gather_parts(gradient, group, dim),
    )


def gather_sequence(part: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Join equal parts of all ranks along ``dim``, if computations differ by rank. Collective."""
    return differentiable(
        group,
        part,
        lambda part: all_gather(part, group, dim),
        lambda gradient: scatter_sum(gradient, group, dim),
    )


def scatter_sum(part: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Sum partial values over the ranks; return this rank's 1 / R along ``dim``. Collective."""
    return differentiable(
        group,
        part,
        lambda part: reduce_scatter(part, group, dim),
        lambda gradient: gather_sequence(gradient, group, dim),
    )


def all_reduce(value: Tensor, group: TensorGroup, *, is_maximum: bool = False) -> Tensor:
    """Return sum or maximum over the ranks, a new tensor, without autograd. Collective."""
    if group.size > 1 and is_compiling():
        return cast("Tensor", compiled_all_reduce(value.detach(), group.name, is_maximum))
    total = value.detach().clone(memory_format=torch.contiguous_format)
    if group.size > 1:
        operator = dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM
        dist.all_reduce(total, operator, group=group.process_group)
    return total


def all_gather(part: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return the equal parts of all ranks joined along ``dim``, without autograd. Collective."""
    part = part.detach()
    if group.size == 1:
        return part
    if is_compiling():
        joined = cast("Tensor", compiled_all_gather(part.movedim(dim, 0), group.name, group.size))
        return joined.movedim(0, dim).clone(memory_format=torch.contiguous_format)
    along_first = part.movedim(dim, 0).contiguous()
    joined = along_first.new_empty(group.size * along_first.shape[0], *along_first.shape[1:])
    all_gather_single(joined, along_first, group=group.process_group)
    return joined.movedim(0, dim).contiguous()


def reduce_scatter(value: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return this rank's 1 / R along ``dim`` of a sum over ranks. No autograd. Collective."""
    value = value.detach()
    if group.size == 1:
        return value
    if is_compiling():
        own = cast("Tensor", compiled_reduce_scatter(value.movedim(dim, 0), group.name, group.size))
        return own.movedim(0, dim).clone(memory_format=torch.contiguous_format)
    along_first = value.movedim(dim, 0).contiguous()
    own = along_first.new_empty(along_first.shape[0] // group.size, *along_first.shape[1:])
    reduce_scatter_single(own, along_first, group=group.process_group)
    return own.movedim(0, dim).contiguous()


def _kept(value: Tensor) -> Tensor:
    return value.view_as(value)


def differentiable(
    group: TensorGroup,
    value: Tensor,
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return ``forward(value)``, with ``backward`` as the function from gradient to gradient.

    Both are linear. A group of one rank returns ``value`` itself.
    """
    if group.size == 1:
        return value
    return linear_map(value, forward, backward)
