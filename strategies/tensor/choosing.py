"""Chooses axes to divide: the most elements, where no parameter is divided twice."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

EXACT_UP_TO = 16
"""Items of a connected component of which every choice is tried."""

_Item = TypeVar("_Item", bound=Hashable)


def choose(
    items: Sequence[_Item], weights: Mapping[_Item, int], conflicts: Mapping[_Item, set[_Item]]
) -> list[_Item]:
    """Return items of the greatest weight of which no two are in conflict.

    A maximum-weight independent set, exact in each connected component of up to ``EXACT_UP_TO``
    items; in larger ones the heaviest item is taken first. The same for the same order of items.

    Args:
        items: In the order that decides between equals.
        weights: Greater than 0.
        conflicts: In both directions.
    """
    place = {each: number for number, each in enumerate(items)}
    chosen: list[_Item] = []
    for component in _components(items, conflicts):
        component.sort(key=place.__getitem__)
        if len(component) <= EXACT_UP_TO:
            chosen += _heaviest(component, weights, conflicts)
        else:
            chosen += _greedy(component, weights, conflicts)
    return sorted(chosen, key=place.__getitem__)


def _components(items: Sequence[_Item], conflicts: Mapping[_Item, set[_Item]]) -> list[list[_Item]]:
    """Items that are in conflict with each other, at least through others."""
    found: list[list[_Item]] = []
    seen: set[_Item] = set()
    for each in items:
        component, waiting = [], [each]
        while waiting:
            item = waiting.pop()
            if item not in seen:
                seen.add(item)
                component.append(item)
                waiting += conflicts.get(item, set())
        if component:
            found.append(component)
    return found


def _heaviest(
    items: Sequence[_Item], weights: Mapping[_Item, int], conflicts: Mapping[_Item, set[_Item]]
) -> list[_Item]:
    """Try each item within a choice and without it."""
    if not items:
        return []
    first, *rest = items
    without = conflicts.get(first, set())
    taken = [
        first, *_heaviest([each for each in rest if each not in without], weights, conflicts)
    ]  # fmt: skip
    if not without & set(rest):
        return taken
    left = _heaviest(rest, weights, conflicts)
    return taken if _weight(taken, weights) >= _weight(left, weights) else left


def _greedy(
    items: Sequence[_Item], weights: Mapping[_Item, int], conflicts: Mapping[_Item, set[_Item]]
) -> list[_Item]:
    chosen: set[_Item] = set()
    for each in sorted(items, key=lambda item: -weights[item]):
        if not conflicts.get(each, set()) & chosen:
            chosen.add(each)
    return [each for each in items if each in chosen]


def _weight(items: Sequence[_Item], weights: Mapping[_Item, int]) -> int:
    return sum(weights[each] for each in items)
