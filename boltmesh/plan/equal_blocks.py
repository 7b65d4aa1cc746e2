"""Finds many equal blocks of a model, so that few of them are run in place of all.

Blocks are equal if they differ in nothing but their number, as for the pipeline's stages.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import itemgetter
from typing import Any, TypeVar

import msgspec
from torch import nn
from torch.nn import Module

from boltmesh.strategies.pipeline.stage.unit_outputs import describe_unit

T = TypeVar("T")

MANY = 8
"""Fewer blocks are run one by one."""


@dataclass(frozen=True)
class EqualBlocks:
    """A list of equal blocks in a model."""

    name: str
    """Name of the list."""
    members: nn.ModuleList | nn.Sequential
    count: int

    @contextlib.contextmanager
    def first(self, count: int) -> Iterator[None]:
        """Within, the model has its first ``count`` blocks only."""
        members = vars(self.members)
        whole = members["_modules"]
        members["_modules"] = dict(list(whole.items())[:count])
        try:
            yield
        finally:
            members["_modules"] = whole

    def others(self, like: int) -> Iterator[tuple[Module, Module]]:
        """Yield each module of the blocks behind one of them, and that one's module."""
        blocks = list(self.members)
        for other in blocks[like + 1 :]:
            yield from zip(other.modules(), blocks[like].modules(), strict=True)

    def names_in_all(self, names: Collection[str]) -> frozenset[str]:
        """Return names of parameters of some blocks, and those of the others like them."""
        found = set(names)
        for name in names:
            head, _, rest = name.removeprefix(f"{self.name}.").partition(".")
            if name.startswith(f"{self.name}.") and head.isdigit():
                found |= {f"{self.name}.{at}.{rest}" for at in range(self.count)}
        return frozenset(found)


def equal_blocks(root: Module) -> EqualBlocks | None:
    """Return the longest list of many equal blocks; None if there is none."""
    lists = [
        EqualBlocks(name, each, len(each))
        for name, each in root.named_modules()
        if isinstance(each, nn.ModuleList | nn.Sequential) and len(each) >= MANY
    ]
    longest = sorted(lists, key=lambda each: -each.count)
    return next((each for each in longest if _are_equal(each)), None)


def _are_equal(blocks: EqualBlocks) -> bool:
    members = list(blocks.members)
    if len(set(map(id, members))) != len(members):
        return False  # one module that runs several times
    described = [describe_unit(each, vars(each).get("forward")) for each in members]
    if len(set(map(itemgetter(0), described))) > 1:
        return False
    settings = [each for _, each in described]
    return all(
        len({each[key] for each in settings}) == 1
        or all(each[key] == (int, at) for at, each in enumerate(settings))
        for key in settings[0]
    )


def continued(one: T, two: T, times: int) -> T:
    """Return figures that grow from ``one`` to ``two``, and ``times`` as far, as a line.

    Each number in mappings, sequences and dataclasses is continued; all else has to be equal.
    """
    found: T = _continued(one, two, times)
    return found


def _continued(one: Any, two: Any, times: int) -> Any:
    if isinstance(one, int | float) and not isinstance(one, bool):
        return one + (two - one) * times
    if isinstance(one, Mapping):
        return {key: _continued(each, two[key], times) for key, each in one.items()}
    if isinstance(one, tuple | list):
        pairs = zip(one, two, strict=True)
        return type(one)(_continued(*pair, times) for pair in pairs)
    if is_dataclass(one) and not isinstance(one, type):
        names = [each.name for each in fields(one)]
        return replace(one, **_members(names, one, two, times))
    if isinstance(one, msgspec.Struct):
        return msgspec.structs.replace(one, **_members(one.__struct_fields__, one, two, times))
    if one != two:
        raise ValueError(f"{one!r} and {two!r} are of different layouts")
    return one


def _members(names: Collection[str], one: Any, two: Any, times: int) -> dict[str, Any]:
    return {name: _continued(getattr(one, name), getattr(two, name), times) for name in names}
