"""Sizes that modules keep as integers, such as ``num_heads``, on ranks that run a part of them."""

from collections.abc import Iterable

from torch.nn import Module

from boltmesh.strategies.tensor.execution.changes import Changes
from boltmesh.strategies.tensor.plan import ShardedParameter, SizeAttribute


def divide_sizes(
    module: Module, attributes: Iterable[SizeAttribute], size: int, changes: Changes
) -> None:
    """Let modules find the sizes of one rank's part. One that has changed since is left alone."""
    for attribute in attributes:
        owner = module.get_submodule(attribute.module)
        if vars(owner).get(attribute.name) == attribute.value:
            changes.set(owner, attribute.name, attribute.value // size)


def divide_width(module: Module, entry: ShardedParameter, size: int, changes: Changes) -> None:
    """Let a module that reshapes what its own matrix gives find the width of its part.

    Such as the Conv1D of GPT-2, which knows its outputs as ``nf``, q, k and v together. Torch's
    layers name their sizes and go by the shapes of their weights.
    """
    if type(module).__module__.startswith("torch.nn."):
        return
    for name, value in list(vars(module).items()):
        if type(value) is int and value == entry.length:
            changes.set(module, name, entry.local_shape(size)[entry.dim])
