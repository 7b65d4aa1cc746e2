"""Finds the modules that are gathered as one: the repeated blocks of a model.

A unit's parameters are gathered when its forward begins and may be freed when that ends, so a unit
has to be a module that is *called*. What no unit owns is gathered once around the whole step. Small
units bound memory, large ones use the links better; the block that an author repeats is nearly
always the right size, and needs no number that somebody has to choose.
"""

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch.nn import Module, Parameter

from boltmesh.errors import ConfigError
from boltmesh.strategies.blocks import can_be_block, find_blocks


def find_units(root: Module, patterns: Sequence[str] | None = None) -> dict[str, Module]:
    """Return the units by dotted name, parents before what is in them.

    Args:
        root: The whole model; never a unit itself.
        patterns: Names, or patterns of which ``*`` stands for one part of a dotted name. None
            takes the repeated blocks: children of a list that occur in the same shape again, with
            their siblings of the same class; else modules that an ``nn.Sequential`` calls, and
            siblings of the same class and shapes. Blocks that share a parameter with something
            outside stay with the root, which gathers it for both.

    Raises:
        ConfigError: When a pattern matches nothing that can be a unit.
    """
    if patterns is not None:
        return _named_units(root, patterns)
    names = _Names(root)
    found = find_blocks(root)
    return {name: unit for name, unit in found.items() if names.find_tie(unit) is None}


class _Names:
    """Under which dotted names parameters and modules stand, all of them where they are shared."""

    def __init__(self, root: Module) -> None:
        self.parameters: dict[Parameter, list[str]] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            self.parameters.setdefault(parameter, []).append(name)
        self.modules: dict[Module, list[str]] = {}
        for name, module in root.named_modules(remove_duplicate=False):
            self.modules.setdefault(module, []).append(name)

    def find_tie(self, unit: Module) -> tuple[str, str] | None:
        """Return a shared parameter's names inside and outside of a unit, None without one."""
        places = tuple(f"{path}." for path in self.modules[unit])
        for parameter in unit.parameters():
            inside = [name for name in self.parameters[parameter] if name.startswith(places)]
            outside = [name for name in self.parameters[parameter] if not name.startswith(places)]
            if outside:
                return inside[0], outside[0]
        return None


def _named_units(root: Module, patterns: Sequence[str]) -> dict[str, Module]:
    modules = {name: each for name, each in root.named_modules() if name}
    chosen: set[str] = set()
    for pattern in patterns:
        matched = [name for name in modules if _matches(name, pattern)]
        if not matched:
            raise ConfigError(_explain_no_match(root, pattern, modules))
        usable = [name for name in matched if can_be_block(modules[name])]
        if not usable:
            raise ConfigError(_explain_no_use(pattern, matched[0], modules[matched[0]]))
        chosen.update(usable)
    units = {name: each for name, each in modules.items() if name in chosen}
    names = _Names(root)
    for name, unit in units.items():
        if tie := names.find_tie(unit):
            raise ConfigError(
                f"blocks={list(patterns)} makes {name!r} a unit, and its parameter {tie[0]!r} is "
                f"also {tie[1]!r}, outside of it: a parameter is gathered with one unit only. "
                f"Leave {name!r} out of blocks, or name a module that holds both."
            )
    return units


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _explain_no_match(root: Module, pattern: str, modules: dict[str, Module]) -> str:
    families = dict.fromkeys(
        re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        for name, each in modules.items()
        if can_be_block(each)
    )
    near = difflib.get_close_matches(pattern, families, n=1, cutoff=0.3)
    hint = f"Did you mean {near[0]!r}?" if near else "Leave blocks out to have them found."
    return f"blocks={pattern!r} matches no module of {type(root).__name__}. {hint}"


def _explain_no_use(pattern: str, name: str, module: Module) -> str:
    kind = type(module).__name__
    if next(module.parameters(), None) is None:
        return (
            f"blocks={pattern!r} is {name!r}, a {kind} without parameters: there is nothing to "
            f"shard. Name a module that has some."
        )
    return (
        f"blocks={pattern!r} is {name!r}, a {kind} without a forward of its own: it is never "
        f"called, so nothing could gather it in time. Name what it holds: '{name}.*'."
    )
