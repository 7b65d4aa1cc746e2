"""Finds out what a step leaves behind on modules between units: buffers and attributes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from boltmesh.strategies.steps.restoring import CONTAINERS
from boltmesh.strategies.torch_compat import times_written

_OWN = frozenset(vars(Module()))
"""What torch itself keeps on a module."""


class StateWatch:
    """Remembers modules as they are; compares them with what they are later.

    Args:
        modules: By name; their children are not looked at.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self._modules = modules
        self._buffers = {
            (name, key): (each, 0 if each.is_inference() else times_written(each))
            for name, module in modules.items()
            for key, each in _buffers_of(module)
        }
        self._attributes = {name: _attributes(each) for name, each in modules.items()}

    def changed_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that were written or replaced, by dotted name, as they are now."""
        changed: dict[str, Tensor] = {}
        for (name, key), (before, written) in self._buffers.items():
            now = dict(_buffers_of(self._modules[name])).get(key)
            if now is None:
                continue
            if now is not before or (not now.is_inference() and times_written(now) != written):
                changed[f"{name}.{key}" if name else key] = now
        return changed

    def changed_attributes(self) -> frozenset[tuple[str, str]]:
        """Return the attributes that are others or hold others, by module and name."""
        return frozenset(
            (name, key)
            for name, before in self._attributes.items()
            for key in _different(before, _attributes(self._modules[name]))
        )


def outside_of(root: Module, units: Iterable[Module]) -> dict[str, Module]:
    """Return the modules that lie in no unit, by dotted name."""
    inside = {part for unit in units for part in unit.modules()}
    return {name: each for name, each in root.named_modules() if each not in inside}


def _buffers_of(module: Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(recurse=False, remove_duplicate=False)


def _attributes(module: Module) -> dict[str, tuple[Any, Any]]:
    return {
        key: (value, value.copy() if type(value) in CONTAINERS else None)
        for key, value in vars(module).items()
        if key not in _OWN
    }


def _different(before: dict[str, tuple[Any, Any]], now: dict[str, tuple[Any, Any]]) -> set[str]:
    shared = before.keys() & now.keys()
    return {
        *(before.keys() ^ now.keys()),
        *(key for key in shared if not _is_same(before[key], now[key])),
    }


def _is_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    if one[0] is not other[0]:
        return False
    if one[1] is None:
        return True
    return len(one[1]) == len(other[1]) and list(map(id, _members(one[1]))) == list(
        map(id, _members(other[1]))
    )


def _members(container: Any) -> Iterator[Any]:
    yield from container
    if isinstance(container, dict):
        yield from container.values()
