"""Process groups of a strategy, destroyed when it is gone and another one begins.

A process may train many times, as in a cross-validation. A group holds threads and sockets, or a
communicator with buffers on the GPU, until it is destroyed.
"""

import gc
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from boltmesh.strategies.object_collectives import gather_objects

Group = TypeVar("Group")


@dataclass(eq=False)
class _Owner:
    strategy: weakref.ref[object]
    world: object
    """The default group: all others go when it is destroyed."""
    groups: list[weakref.ref[dist.ProcessGroup]] = field(default_factory=list)


_owners: list[_Owner] = []
"""In the order in which they began, the one that is set up last."""


def begin(strategy: object) -> None:
    """Destroy the groups of strategies that are gone, and give this one those made from now on.

    Collective over all ranks, whenever a strategy is set up. A strategy goes with its Trainer; as
    ranks may collect garbage at different times, groups are kept that one rank may still use.
    """
    world = dist.group.WORLD
    known = [each for each in _owners if each.world is world]
    mine = next((each for each in known if each.strategy() is strategy), None)
    if mine is None:
        if known:
            gc.collect()
            gone = gather_objects([each.strategy() is None for each in known])
            ended = [each for each, *ranks in zip(known, *gone, strict=True) if all(ranks)]
            for each in ended:
                _destroy(each)
            known = [each for each in known if each not in ended]
        mine = _Owner(weakref.ref(strategy), world)
    _owners[:] = [*(each for each in known if each is not mine), mine]


def register(group: Group) -> Group:
    """Return a new group, which is destroyed after the strategy that is set up.

    Args:
        group: As ``new_group`` returns it, also on a rank that is no member.
    """
    if _owners and isinstance(group, dist.ProcessGroup):
        _owners[-1].groups.append(weakref.ref(group))
    return group


def _destroy(owner: _Owner) -> None:
    for each in owner.groups:
        group = each()
        if group is not None:
            with suppress(ValueError):  # it has been destroyed
                dist.destroy_process_group(group)
