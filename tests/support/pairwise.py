"""Chooses which cases of a test ``make test`` runs; the others are marked ``full``.

``@pytest.mark.sample("id", ...)`` above the ``parametrize`` marks of a test keeps these cases.
``@pytest.mark.pairwise`` keeps so many that each pair of values is there,
``@pytest.mark.each_choice`` each value, for matrices of two axes. A parametrize of several names at
once is one axis, whose rows all stay. ``make test-all`` runs all cases. Most faults of combinations
take two values: Kuhn, Wallace, Gallo, "Software Fault Interactions and Implications for Software
Testing", 2004; both names are of Grindal, Offutt, Andler, "Combination Testing Strategies", 2005.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest

Values = frozenset[tuple[str, Hashable]]


def cover(cases: Sequence[Mapping[str, Hashable]], strength: int = 2) -> set[int]:
    """Choose cases, by their places, that hold each combination of values which any case holds.

    Greedy: of those that hold most combinations which are still missing, one whose values were
    chosen least, and of these the first.

    Args:
        cases: The value of each argument.
        strength: How many values make a combination: 2 for each pair, 1 for each value.
    """
    held = [_combinations(each, strength) for each in cases]
    missing = set().union(*held)
    uses: Counter[tuple[str, Hashable]] = Counter()
    chosen: set[int] = set()

    def gain(at: int) -> tuple[int, int, int]:
        return len(held[at] & missing), -sum(uses[each] for each in cases[at].items()), -at

    while missing:
        best = max(range(len(cases)), key=gain)
        chosen.add(best)
        missing -= held[best]
        uses.update(cases[best].items())
    return chosen


def _combinations(case: Mapping[str, Hashable], strength: int) -> set[Values]:
    return {frozenset(each) for each in combinations(case.items(), min(strength, len(case)))}


def mark_the_rest(items: Sequence[pytest.Item], *, is_whole: bool = True) -> None:
    """Mark the cases of a test that are not chosen as ``full``.

    Args:
        items: All that was collected.
        is_whole: Whether all cases of each test are among them.

    Raises:
        pytest.UsageError: If a sample names a case that is not there.
    """
    _mark_outside_samples(items, is_whole=is_whole)
    for marker, strength in (("pairwise", 2), ("each_choice", 1)):
        matrices: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker(marker) is not None:
                matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for matrix in matrices.values():
            chosen = cover([_places(each) for each in matrix], strength)
            for at, item in enumerate(matrix):
                if at not in chosen:
                    item.add_marker(pytest.mark.full)


def _mark_outside_samples(items: Sequence[pytest.Item], *, is_whole: bool) -> None:
    missing: dict[str, set[str]] = {}
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample is None:
            continue
        test, _, case = item.nodeid.partition("[")
        left = missing.setdefault(test, set(sample.args))
        if (case := case.removesuffix("]")) in sample.args:
            left.discard(case)
        else:
            item.add_marker(pytest.mark.full)
    if is_whole and (wrong := {test: left for test, left in missing.items() if left}):
        raise pytest.UsageError(f"these samples name cases that are not there: {wrong}")


def _places(item: pytest.Item) -> dict[str, Hashable]:
    """Of each axis, a parametrize or a fixture's params, which row a test has."""
    callspec = getattr(item, "callspec", None)
    left = {} if callspec is None else {name: id(each) for name, each in callspec.params.items()}
    found: dict[str, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        found[names] = tuple(left.pop(each.strip()) for each in names.split(",") if each)
    return {**found, **left}
