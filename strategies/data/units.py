"""Finds the modules that are gathered as one: the repeated blocks of a model.

A unit's parameters are gathered when its forward begins and may be freed when that ends, so a unit
has to be a module that is *called*. What no unit owns is gathered once around the whole step. Small
units bound memory, large ones use the links better; the block that an author repeats is nearly
always the right size, and needs no number that somebody has to choose.
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn import Module, Parameter

from boltmesh.errors import ConfigError

LISTS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
"""What authors put repeated blocks in."""

MIN_SHARE = 1 / 200
"""A single module of an ``nn.Sequential`` is worth a collective from this share of the model on."""

_Signature = tuple[tuple[str, tuple[int, ...]], ...]


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
    found = _Search(root).units()
    return {name: unit for name, unit in found.items() if names.find_tie(unit) is None}


def has_forward(module: Module) -> bool:
    """Whether the module can be called, and not only looked into.

    The forward of a LightningModule only says that there is none.
    """
    for kind in type(module).__mro__:
        if "forward" in vars(kind):
            return kind is not Module and not kind.__module__.startswith("lightning.")
    return False


class _Search:
    """One walk over a model that nobody has described."""

    def __init__(self, root: Module) -> None:
        self.root = root
        self.total = sum(each.numel() for each in root.parameters())
        self.repeated = _repeated_kinds(root)

    def units(self) -> dict[str, Module]:
        return dict(self._within(self.root, "", set()))

    def _within(
        self, module: Module, prefix: str, seen: set[Module]
    ) -> Iterator[tuple[str, Module]]:
        """Give the units below a module that is none itself."""
        children = [(name, each) for name, each in module.named_children() if each not in seen]
        seen.update(each for _, each in children)
        twins = Counter(_kind_and_shapes(each) for _, each in children)
        for name, child in children:
            path = f"{prefix}{name}"
            if not _can_be_unit(child):
                yield from self._within(child, f"{path}.", seen)
            elif isinstance(module, LISTS) and _kind(child) in self.repeated:
                yield path, child
            elif below := list(self._within(child, f"{path}.", seen)):
                yield from below
            elif self._is_called_in_turn(module, child) or (
                not _is_torch_class(child) and twins[_kind_and_shapes(child)] > 1
            ):
                yield path, child

    def _is_called_in_turn(self, parent: Module, child: Module) -> bool:
        if not isinstance(parent, nn.Sequential):
            return False
        return sum(each.numel() for each in child.parameters()) >= MIN_SHARE * self.total


def _repeated_kinds(root: Module) -> set[object]:
    """Return the kinds of which some list holds two in the same shape."""
    kinds: set[object] = set()
    for each in root.modules():
        if isinstance(each, LISTS):
            # Iterated, a list tells of a block that it holds twice; ``children()`` does not.
            members = each.values() if isinstance(each, nn.ModuleDict) else each
            counts = Counter(_kind_and_shapes(child) for child in members if _can_be_unit(child))
            kinds.update(kind for (kind, _), count in counts.items() if count > 1)
    return kinds


def _kind(module: Module) -> object:
    """Return what makes modules one of a kind: an author's class, but no general-purpose one."""
    return (type(module), _shapes(module)) if _is_torch_class(module) else type(module)


def _kind_and_shapes(module: Module) -> tuple[object, _Signature]:
    return _kind(module), _shapes(module)


def _shapes(module: Module) -> _Signature:
    return tuple((name, tuple(each.shape)) for name, each in module.named_parameters())


def _is_torch_class(module: Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _can_be_unit(module: Module) -> bool:
    return has_forward(module) and next(module.parameters(), None) is not None


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
        usable = [name for name in matched if _can_be_unit(modules[name])]
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
        if _can_be_unit(each)
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
