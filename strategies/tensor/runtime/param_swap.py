"""What stands in the place of a parameter while its module runs.

A parameter is a plain tensor that DDP, FSDP2 and optimizers know. What its use needs beside that
(its gradient summed over the ranks, a bias that is added later) is a differentiable view of it,
which the module finds under the parameter's name as long as its forward lasts.

``Changes`` has what a plan puts on a model's modules, and takes it off again. Wrappers are on
instances, in the place of a method; classes, parameters and names stay as they are. A wrapper
around ``forward``, and no hook, changes what a module takes, gives and reads: it also runs where
activation checkpointing repeats a block, and is left where the block raises.

``shard_of`` cuts parameters into the shards of the ranks, ``join_shards`` joins them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.errors import LayoutError
from boltmesh.strategies.tensor.plan import ShardedParameter, runs
from boltmesh.strategies.tensor.runtime.collectives import (
    TensorGroup,
    all_gather,
    differentiable,
    reduce_gradient,
)
from boltmesh.strategies.torch_compat.modules import wrapped
from boltmesh.strategies.torch_compat.tensors import tree_map_only

Around = Callable[..., Any]
"""Called with the method that it wraps, and with the arguments of the call."""

_ABSENT = object()

Original = tuple[Module, str, object]
"""A module, an attribute and its value before a change."""


class Changes:
    """A list of changes to modules, taken back in the reverse order."""

    def __init__(self) -> None:
        self._before: list[tuple[Module, str, Any]] = []

    def wrap(self, module: Module, around: Around, method: str = "forward") -> None:
        """Call ``around(method, *args, **kwargs)`` where ``method(*args, **kwargs)`` is called.

        A copy of the module calls the copy's method: ``around`` is to hold the module only in ways
        that ``copy.deepcopy`` follows.
        """
        self.set(module, method, wrapped(getattr(module, method), around))

    def set(self, module: Module, name: str, value: object) -> None:
        """Give an instance an attribute that is neither parameter, buffer nor module."""
        self._before.append((module, name, vars(module).get(name, _ABSENT)))
        vars(module)[name] = value

    def originals_of(self, block: Module) -> list[Original]:
        """Return what a block's modules had before the first change of each attribute."""
        inside = set(block.modules())
        found: dict[tuple[Module, str], object] = {}
        for module, name, before in self._before:
            if module in inside:
                found.setdefault((module, name), before)
        return [(module, name, before) for (module, name), before in found.items()]

    def undo(self) -> None:
        """Put everything back. What others put on modules since then has to be off."""
        _restore(reversed(self._before))
        self._before.clear()


@contextmanager
def originals_restored(originals: Iterable[Original]) -> Iterator[None]:
    """Context in which modules have attributes as they were before changes."""
    originals = list(originals)
    changed = [(module, name, vars(module).get(name, _ABSENT)) for module, name, _ in originals]
    _restore(originals)
    try:
        yield
    finally:
        _restore(changed)


def _restore(values: Iterable[Original]) -> None:
    for module, name, value in values:
        if value is not _ABSENT:
            vars(module)[name] = value
        else:
            vars(module).pop(name, None)


def shard_of(whole: Tensor, entry: ShardedParameter, *, size: int, rank: int) -> Tensor:
    """Copy what a rank keeps of a tensor: contiguous, sections joined in the shard's order."""
    pieces = [
        whole.narrow(entry.dim, run.start, run.length) for run in runs(entry.sections, size, rank)
    ]
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(pieces, entry.dim) if pieces else whole.narrow(entry.dim, 0, 0).clone()


def join_shards(shards: Sequence[Tensor], entry: ShardedParameter) -> Tensor:
    """Return the whole tensor of which the ranks, in their order, keep ``shards``."""
    whole = shards[0].new_empty(entry.shape)
    for rank, shard in enumerate(shards):
        for run in runs(entry.sections, len(shards), rank):
            part = shard.narrow(entry.dim, run.local_start, run.length)
            whole.narrow(entry.dim, run.start, run.length).copy_(part)
    return whole


def broadcast_whole(shard: Tensor, entry: ShardedParameter, group: TensorGroup) -> Tensor:
    """Return the whole tensor, without a gradient. Collective.

    Args:
        shard: This rank's shard, of its own shape.
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
    """Return the whole tensor, for a computation that is the same on all ranks. Collective.

    Its gradient is the same on all ranks, so each keeps its own part of it.

    Args:
        shard: This rank's shard, of its own shape.
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
    """Keep this rank's shards in the place of whole parameters. Local; not to be undone.

    Parameters stay the objects that they are, so tied names, and lists that the author made of
    them, keep their meaning. A parameter that is a shard already is left alone.

    Raises:
        LayoutError: When the model has another parameter under a name, or none.
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


@contextmanager
def in_place_of(module: Module, views: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Let a module find views under the names of its parameters.

    Attributes of an instance are found before ``Module.__getattr__`` looks for parameters.
    """
    attributes = vars(module)
    before = {name: attributes.get(name, _ABSENT) for name in views}
    attributes.update(views)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                del attributes[name]
            else:
                attributes[name] = value


def own_parameters(module: Module) -> dict[str, Parameter]:
    """Return a module's own parameters, never their views; what FSDP2 gathered where it has."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def summed_gradient(value: Tensor, group: TensorGroup) -> Tensor:
    """Return ``value`` for use with something divided: ranks have parts of its gradient."""
    if not (value.requires_grad and torch.is_grad_enabled()):
        return value
    return reduce_gradient(value, group)


@dataclass(frozen=True)
class PartialGradients:
    """Around a module whose whole parameters, or some of them, meet something divided."""

    module: Module
    """Whose parameters they are."""
    names: tuple[str, ...]
    group: TensorGroup

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        own = own_parameters(self.module)
        views = {name: summed_gradient(own[name], self.group) for name in self.names}
        with in_place_of(self.module, views):
            return forward(*args, **kwargs)


@dataclass(frozen=True)
class ReplicatedOutput:
    """Around a module whose output is alike on all ranks, and meets something divided."""

    group: TensorGroup

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return map_floats(lambda each: summed_gradient(each, self.group), forward(*args, **kwargs))


def map_floats(function: Any, value: Any) -> Any:
    """Apply a function to the floating point tensors in a value, whose structure stays."""
    return tree_map_only(
        Tensor, lambda each: function(each) if each.is_floating_point() else each, value
    )
