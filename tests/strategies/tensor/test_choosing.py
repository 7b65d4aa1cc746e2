import random
from itertools import combinations

import pytest

from boltmesh.strategies.tensor.planning import EXACT_UP_TO, choose


def graph(seed, count):
    """Random weights and conflicts, in both directions."""
    generator = random.Random(seed)
    weights = {item: generator.randint(1, 9) for item in range(count)}
    conflicts: dict[int, set[int]] = {item: set() for item in range(count)}
    for one, other in combinations(range(count), 2):
        if generator.random() < 0.35:
            conflicts[one].add(other)
            conflicts[other].add(one)
    return weights, conflicts


def is_allowed(items, conflicts):
    return not any(other in conflicts[one] for one, other in combinations(items, 2))


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_heaviest_of_all_that_are_allowed(seed):
    weights, conflicts = graph(seed, 9)
    every = (
        items
        for count in range(10)
        for items in combinations(range(9), count)
        if is_allowed(items, conflicts)
    )

    chosen = choose(range(9), weights, conflicts)

    assert is_allowed(chosen, conflicts)
    assert sum(map(weights.get, chosen)) == max(sum(map(weights.get, items)) for items in every)


@pytest.mark.parametrize("seed", range(5))
def test_large_components_are_chosen_from_as_well(seed):
    count = 3 * EXACT_UP_TO
    weights, conflicts = graph(seed, count)

    chosen = choose(range(count), weights, conflicts)

    assert chosen == sorted(chosen)
    assert is_allowed(chosen, conflicts)
    # Nothing could be added to it.
    assert all(conflicts[item] & set(chosen) for item in set(range(count)) - set(chosen))


def test_of_equals_the_first_is_chosen():
    assert choose("abc", dict.fromkeys("abc", 1), {"a": {"b"}, "b": {"a", "c"}, "c": {"b"}}) == [
        "a", "c",
    ]  # fmt: skip
    assert choose("ab", dict.fromkeys("ab", 1), {"a": {"b"}, "b": {"a"}}) == ["a"]


def test_what_is_in_no_conflict_is_chosen():
    assert choose("ab", {"a": 1, "b": 2}, {}) == ["a", "b"]
