"""Which modules take part in a plan: those that own divided parameters, and what holds them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch.nn import Module

from boltmesh.strategies.blocks import has_forward
from boltmesh.strategies.tensor.backends import OUTSIDE
from boltmesh.strategies.tensor.plan import ShardedParameter, Style, TensorPlan


@dataclass(frozen=True)
class Owner:
    """A module with divided parameters of its own."""

    name: str
    module: Module
    axis: int
    entries: tuple[ShardedParameter, ...]
    """Each with the name that this owner has for it."""

    @property
    def styles(self) -> frozenset[Style]:
        """Of its parameters."""
        return frozenset(entry.style for entry in self.entries)

    @property
    def attributes(self) -> frozenset[str]:
        """What the parameters are called on the module."""
        return frozenset(entry.name.rpartition(".")[2] for entry in self.entries)

    def leading(self, style: Style) -> ShardedParameter:
        """The parameter of that style with the most dimensions: the matrix, not its bias."""
        return max(
            (entry for entry in self.entries if entry.style == style),
            key=lambda entry: len(entry.shape),
        )


def owners_of(root: Module, plan: TensorPlan) -> list[Owner]:
    """Return the modules that a plan divides parameters of, in the plan's order.

    But for tables and heads, whose tokens are divided outside of blocks.
    """
    found: dict[str, list[ShardedParameter]] = defaultdict(list)
    for entry in plan.sharded.values():
        for name in entry.names:
            if entry.style != "vocabulary":
                found[name.rpartition(".")[0]].append(replace(entry, name=name))
    return [
        Owner(name, root.get_submodule(name), entries[0].axis, tuple(entries))
        for name, entries in found.items()
    ]


def block_around(name: str, blocks: Iterable[str]) -> str:
    """Return the block that a module lies in, or what stands for none."""
    return next((each for each in blocks if f"{name}.".startswith(f"{each}.")), OUTSIDE)


def scope_of(root: Module, names: Sequence[str]) -> str:
    """Return the innermost module that holds all of some modules, and that code calls.

    One of them is held by itself. The root, where no other holds them.
    """
    common = names[0].split(".")
    for name in names[1:]:
        parts = name.split(".")
        shared = 0
        while shared < min(len(common), len(parts)) and common[shared] == parts[shared]:
            shared += 1
        common = common[:shared]
    while common and not has_forward(root.get_submodule(".".join(common))):
        common.pop()
    return ".".join(common)


def caller_of(root: Module, name: str) -> str:
    """Return the module in whose forward a module's own parameters are read.

    Itself, except for a ``ParameterList`` and others that are looked into, and not called.
    """
    parts = name.split(".") if name else []
    while parts and not has_forward(root.get_submodule(".".join(parts))):
        parts.pop()
    return ".".join(parts)
