"""Process groups of strategies that no longer exist: used again, or destroyed.

A process may train many times, as in a cross-validation. A group holds threads and sockets, or a
communicator with buffers on the GPU, until it is destroyed. Groups of an axis are not destroyed:
torch caches meshes by their ranks, and may look up the group of an equal mesh. After an error all
groups are kept: their ranks may have made different numbers of calls, and a group waits for
calls that have begun before it is destroyed.
"""

import gc
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from boltmesh.strategies.object_collectives import gather_objects

T = TypeVar("T")


@dataclass(eq=False)
class _StrategyGroups:
    strategy: weakref.ref[object]
    world: object
    """The default group: all others go when it is destroyed."""
    modules: "weakref.WeakSet[object]" = field(default_factory=weakref.WeakSet)
    """Models that it trained; their parameters may be gathered after the Trainer is deleted."""
    temporary: list[weakref.ref[dist.ProcessGroup]] = field(default_factory=list)
    axes: list[tuple[Hashable, Any]] = field(default_factory=list)
    unfinished: int = 0
    """Number of runs that have begun and have not ended without an error."""

    @property
    def is_gone(self) -> bool:
        """Whether neither the strategy nor any model of it exists any more."""
        return self.strategy() is None and not self.modules


_strategies: list[_StrategyGroups] = []
"""In the order in which they were set up."""
_spare: dict[tuple[Hashable, object], list[Any]] = {}
"""Groups of axes that can be used again."""


def begin(strategy: object, module: object) -> None:
    """Register a strategy that is set up, and free the groups of deleted strategies.

    Collective over all ranks. A strategy is deleted with its Trainer, and its groups are freed when
    its models are deleted as well. Ranks may collect garbage at different times: groups are kept
    while one rank may use them.
    """
    world = dist.group.WORLD
    known = [each for each in _strategies if each.world is world]
    mine = next((each for each in known if each.strategy() is strategy), None)
    if mine is None:
        if known:
            gc.collect()
            ranks = gather_objects([(each.is_gone, each.unfinished) for each in known])
            known = [
                each for each, *states in zip(known, *ranks, strict=True) if not _free(each, states)
            ]
        mine = _StrategyGroups(weakref.ref(strategy), world)
    mine.unfinished += 1
    if module is not None:
        mine.modules.add(module)
    _strategies[:] = [*(each for each in known if each is not mine), mine]
    for key in [each for each in _spare if each[1] is not world]:
        del _spare[key]


def end(strategy: object) -> None:
    """Register that a run of a strategy ended without an error on this rank."""
    for each in _groups_of(strategy):
        each.unfinished = max(each.unfinished - 1, 0)


def temporary_group(group: T, strategy: object) -> T:
    """Return ``group``, which no mesh has; it is destroyed after the strategy is deleted.

    Args:
        group: The new group, as ``new_group`` returns it, also on a rank that is no member.
        strategy: The strategy that uses it.
    """
    if isinstance(group, dist.ProcessGroup):
        for each in _groups_of(strategy):
            each.temporary.append(weakref.ref(group))
    return group


def axis_group(key: Hashable, make: Callable[[], T], strategy: object) -> T:
    """Return a group of a deleted strategy, or a new one. Collective if ``make`` is.

    Args:
        key: Ranks and settings of the group, equal on all ranks. A group with an equal key can be
            used instead.
        make: Creates the group; also called on ranks that are no members.
        strategy: The strategy that uses it.
    """
    spare = _spare.get((key, dist.group.WORLD))
    group: T = spare.pop(0) if spare else make()
    for each in _groups_of(strategy):
        each.axes.append((key, group))
    return group


def _groups_of(strategy: object) -> list[_StrategyGroups]:
    return [each for each in _strategies if each.strategy() is strategy]


def _free(groups: _StrategyGroups, states: list[tuple[bool, int]]) -> bool:
    """Free the groups of a strategy if it is deleted on all ranks; return whether it is.

    Args:
        groups: The groups of the strategy.
        states: By rank, whether it is deleted, and how many of its runs are unfinished.
    """
    if not all(is_gone for is_gone, _ in states):
        return False
    if any(unfinished for _, unfinished in states):
        return True
    for each in groups.temporary:
        group = each()
        if group is not None:
            with suppress(ValueError):  # it has been destroyed
                dist.destroy_process_group(group)
    for key, axis in groups.axes:
        _spare.setdefault((key, groups.world), []).append(axis)
    return True
