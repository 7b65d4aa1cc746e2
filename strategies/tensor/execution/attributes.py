"""Sizes that modules keep as integers, such as ``num_heads``, on ranks that run a part of them."""

from collections.abc import Iterable

from torch.nn import Module

from boltmesh.strategies.tensor.execution.changes import Changes
from boltmesh.strategies.tensor.plan import SizeAttribute


def divide_sizes(
    module: Module, attributes: Iterable[SizeAttribute], size: int, changes: Changes
) -> None:
    """Let modules find the sizes of one rank's part. One that has changed since is left alone."""
    for attribute in attributes:
        owner = module.get_submodule(attribute.module)
        if vars(owner).get(attribute.name) == attribute.value:
            changes.set(owner, attribute.name, attribute.value // size)
