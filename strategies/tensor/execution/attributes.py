"""Sizes that modules keep as integers, such as ``num_heads``, on ranks that run a part of them."""

from collections.abc import Iterable

from torch.nn import Module

from boltmesh.strategies.tensor.execution.changes import Changes
from boltmesh.strategies.tensor.execution.owners import Owner
from boltmesh.strategies.tensor.plan import ShardedParameter, SizeAttribute

_PRODUCTS = {"column", "row", "expert"}
"""Styles of the matrices that a module multiplies with."""


def divide_sizes(
    module: Module, attributes: Iterable[SizeAttribute], size: int, changes: Changes
) -> None:
    """Let modules find the sizes of one rank's part. One that has changed since is left alone."""
    for attribute in attributes:
        owner = module.get_submodule(attribute.module)
        if vars(owner).get(attribute.name) == attribute.value:
            changes.set(owner, attribute.name, attribute.value // size)


def widths_of(owners: Iterable[Owner]) -> dict[type[Module], set[str]]:
    """Return, by class, what modules with columns call the width of what their matrix gives.

    Such as ``nf`` of GPT-2's Conv1D, which knows q, k and v together. A number that is the width of
    some modules of the class alone, such as their place in the model, is none. Torch's layers name
    their sizes and go by the shapes of their weights.
    """
    found: dict[type[Module], set[str]] = {}
    for owner in owners:
        kind = type(owner.module)
        if owner.styles & _PRODUCTS != {"column"} or kind.__module__.startswith("torch.nn."):
            continue
        length = owner.leading("column").length
        own = {
            name
            for name, value in vars(owner.module).items()
            if type(value) is int and value == length
        }
        found[kind] = found.get(kind, own) & own
    return found


def divide_width(
    module: Module, entry: ShardedParameter, names: Iterable[str], size: int, changes: Changes
) -> None:
    """Let a module that reshapes what its own matrix gives find the width of its part.

    Args:
        module: With columns.
        entry: Its matrix.
        names: What it calls the width, see ``widths_of``.
        size: Ranks.
        changes: Where the change is noted.
    """
    for name in names:
        changes.set(module, name, entry.local_shape(size)[entry.dim])
