"""The tests that ``make test`` runs of a matrix hold every pair of its values."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.pairwise import cover, mark_the_rest


@pytest.mark.parametrize("sizes", [(1,), (4,), (3, 2), (3, 3, 3), (7, 3, 2, 2), (5, 4, 3, 2, 2)])
def test_every_pair_is_there_and_few_cases_are(sizes):
    values = [range(size) for size in sizes]
    cases = [{str(axis): at for axis, at in enumerate(each)} for each in itertools.product(*values)]
    chosen = cover(cases)
    assert chosen == cover(cases)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        met = {(cases[at][str(one)], cases[at][str(other)]) for at in chosen}
        assert met == set(itertools.product(values[one], values[other]))
    two_largest = sorted(sizes)[-2:]
    least = two_largest[0] * two_largest[-1] if len(sizes) > 1 else sizes[0]
    assert least <= len(chosen) <= 1.6 * least


def test_a_pair_that_no_case_has_is_not_asked_for():
    cases = [{"rank": 0, "size": 0}, {"rank": 1, "size": 0}, {"rank": 1, "size": 1}]
    assert cover(cases) == {0, 1, 2}
    assert cover([]) == set()


@pytest.mark.parametrize("sizes", [(3,), (6, 3), (4, 4, 2)])
def test_every_value_is_there_as_often_as_others_of_its_axis(sizes):
    places = itertools.product(*map(range, sizes))
    cases = [{str(axis): at for axis, at in enumerate(each)} for each in places]
    chosen = cover(cases, strength=1)
    assert len(chosen) == max(sizes)
    for axis, size in enumerate(sizes):
        counts = [sum(cases[at][str(axis)] == value for at in chosen) for value in range(size)]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1


def test_what_is_left_out_is_marked():
    items = _collected()
    mark_the_rest(items)
    full = [each for each in items if each.get_closest_marker("full")]
    assert len(items) == 27
    assert 9 <= len(items) - len(full) <= 12


def test_a_sample_is_what_stays():
    items: Any = [_Item((0, 0, 0), case, "one", "two") for case in ("one", "two", "three")]
    mark_the_rest(items)
    assert [each.get_closest_marker("full") is not None for each in items] == [False, False, True]
    with pytest.raises(pytest.UsageError, match="'two'"):
        mark_the_rest(items[:1])
    mark_the_rest(items[:1], is_whole=False)


class _Item:
    def __init__(self, place, case="0", *sample):
        self.nodeid = f"tests/test_it.py::test_it[{case}]"
        first, second, third = place
        self.callspec = SimpleNamespace(
            params={"first": ROWS[first], "mine": ROWS[first], "second": second, "fixture": third}
        )
        self.marks = [
            pytest.mark.parametrize(("first", "mine"), []).mark,
            pytest.mark.parametrize("second", []).mark,
            pytest.mark.sample(*sample).mark if sample else pytest.mark.pairwise.mark,
        ]

    def iter_markers(self, name):
        return (each for each in self.marks if each.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)

    def add_marker(self, mark):
        self.marks.append(mark.mark)


ROWS = [{"equal": 1}, {"equal": 1}, {"equal": 1}]
"""Of a parametrize with several names: its rows count, whatever is in them."""


def _collected():
    return [_Item(place) for place in itertools.product(range(3), repeat=3)]
