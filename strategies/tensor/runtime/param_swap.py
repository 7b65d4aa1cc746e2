"""Replaces parameters by shards, and by differentiable views while their module runs.

Parameters are plain tensors, as DDP, FSDP2 and optimizers expect. If a use needs more (a gradient
summed over the ranks, a bias that is added later), the module finds a differentiable view under the
parameter's name during its forward.

``shard_of`` cuts parameters into the shards of the ranks, ``join_shards`` joins them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.errors import LayoutError
from boltmesh.strategies.checkpoint.chunks import DimDivision, ElementStretch
from boltmesh.strategies.patch import Around, patched
from boltmesh.strategies.tensor.plan import ShardedParameter, runs
from boltmesh.strategies.tensor.runtime.collectives import (
    TensorGroup,
    all_gather,
    differentiable,
    reduce_gradient,
)
from boltmesh.strategies.torch_compat.tensors import tree_map_only


def division_of(entry: ShardedParameter, size: int, rank: int) -> DimDivision:
    """Return a rank's division of a parameter."""
    stretches = tuple(ElementStretch(*each) for each in runs(entry.sections, size, rank))
    return DimDivision(torch.Size(entry.shape), entry.dim, stretches)


def shard_of(whole: Tensor, entry: ShardedParameter, *, size: int, rank: int) -> Tensor:
    """Copy a rank's shard of a tensor: contiguous, sections in the shard's order.

    Args:
        whole: Tensor of shape ``entry.shape``, any dtype.
        entry: How it is divided.
        size: Number of ranks.
        rank: The rank.

    Returns:
        Shape ``entry.local_shape(size, rank)``, same dtype.
    """
    division = division_of(entry, size, rank)
    return division.cut(whole) if division.stretches else whole.narrow(entry.dim, 0, 0).clone()


def join_shards(shards: Sequence[Tensor], entry: ShardedParameter) -> Tensor:
    """Return the whole tensor, ``entry.shape``, from the shards of all ranks in order."""
    whole = shards[0].new_empty(entry.shape)
    for rank, shard in enumerate(shards):
        division_of(entry, len(shards), rank).put(shard, whole)
    return whole


def broadcast_whole(shard: Tensor, entry: ShardedParameter, group: TensorGroup) -> Tensor:
    """Return the whole tensor, ``entry.shape``, without autograd. Collective.

    Args:
        shard: This rank's shard, ``entry.local_shape(size, rank)``; ranks may have unequal ones.
        entry: How the tensor is divided.
        group: Ranks that share it.
    """
    shards = [shard.new_empty(entry.local_shape(group.size, rank)) for rank in range(group.size)]
    shards[group.rank] = shard.detach().contiguous()
    for rank, each in enumerate(shards):
        source = dist.get_global_rank(group.process_group, rank)
        dist.broadcast(each, source, group=group.process_group)
    return join_shards(shards, entry)


def gather_whole(shard: Tensor, entry: ShardedParameter, group: TensorGroup) -> Tensor:
    """Return the whole tensor, ``entry.shape``, for replicated computations. Collective.

    Its gradient is replicated, so each rank keeps its own part of it.

    Args:
        shard: This rank's shard, ``entry.local_shape(size, rank)``; ranks may have unequal ones.
        entry: How the tensor is divided.
        group: Ranks that share it.
    """

    def join(shard: Tensor) -> Tensor:
        padded = shard.new_zeros(entry.local_shape(group.size, 0))  # no rank has more
        padded.narrow(entry.dim, 0, shard.shape[entry.dim]).copy_(shard)
        return join_shards(all_gather(padded[None], group, 0).unbind(), entry)

    def cut(whole: Tensor) -> Tensor:
        return shard_of(whole, entry, size=group.size, rank=group.rank)

    return differentiable(
        group,
        shard,
        join,
        lambda gradient: differentiable(
            group, gradient, cut, lambda each: gather_whole(each, entry, group)
        ),
    )


@torch.no_grad()
def shard_parameters(
    module: Module, entries: Iterable[ShardedParameter], *, size: int, rank: int
) -> None:
    """Replace whole parameters by this rank's shards. Local; cannot be undone.

    The parameter objects do not change, so tied names, and lists that the author made of them, stay
    valid. A parameter that is a shard already is left alone.

    Raises:
        LayoutError: When the model has no such parameter, or one of another shape.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for entry in entries:
        parameter = parameters.get(entry.name)
        if parameter is None:
            raise LayoutError(
                f"The tensor plan divides '{entry.name}', and the model has no such parameter. "
                f"All ranks have to build the same model."
            )
        shape, local_shape = tuple(parameter.shape), entry.local_shape(size, rank)
        if shape == local_shape:
            continue
        if shape != entry.shape:
            raise LayoutError(
                f"The tensor plan divides '{entry.name}' of shape {entry.shape}, and the model "
                f"has one of {shape}. All ranks have to build the same model."
            )
        parameter.data = shard_of(parameter.data, entry, size=size, rank=rank)
        parameter.grad = None


def own_parameters(module: Module) -> dict[str, Parameter]:
    """Return a module's own parameters, never their views; unsharded ones if FSDP2 gathered."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def summed_gradient(value: Tensor, group: TensorGroup) -> Tensor:
    """Return ``value`` for use with divided operands; its partial gradients are summed."""
    if not (value.requires_grad and torch.is_grad_enabled()):
        return value
    return reduce_gradient(value, group)


@dataclass(frozen=True)
class PartialGradients:
    """Wrapper of a module whose whole parameters, or some of them, meet divided operands."""

    module: Module
    """The owner of the parameters."""
    names: tuple[str, ...]
    group: TensorGroup

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        own = own_parameters(self.module)
        views = {name: summed_gradient(own[name], self.group) for name in self.names}
        with patched(self.module, **views):
            return forward(*args, **kwargs)


@dataclass(frozen=True)
class ReplicatedOutput:
    """Wrapper of a module whose replicated output meets divided operands."""

    group: TensorGroup

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return map_floats(lambda each: summed_gradient(each, self.group), forward(*args, **kwargs))


def map_floats(function: Any, value: Any) -> Any:
    """Apply a function to the floating-point tensors in a nested value, keeping its structure."""

    def change(tensor: Tensor) -> Any:
        return function(tensor) if tensor.is_floating_point() else tensor

    return change(value) if isinstance(value, Tensor) else tree_map_only(Tensor, change, value)
