"""Which elements of a dimension each tensor rank keeps."""

import itertools

import pytest

from boltmesh.strategies.tensor.plan import Section, ShardedParameter, balanced_share, runs

VOCABULARIES = [(1, 1), (7, 2), (8, 2), (31, 4), (50257, 4), (3, 4)]


@pytest.mark.parametrize(("count", "size"), VOCABULARIES)
def test_shares_cover_every_token_once_and_differ_by_one_at_most(count: int, size: int) -> None:
    shares = [balanced_share(count, size, rank) for rank in range(size)]
    end = 0
    for start, length in shares:
        assert start == end
        end += length
    assert end == count
    lengths = [length for _, length in shares]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "sections", [[Section(1, 7, 1)], [Section(1, 5, 2), Section(3, 4, 1)], [Section(2, 2, 3)]]
)
def test_runs_cover_every_element_once_where_counts_do_not_divide(
    sections: list[Section], size: int
) -> None:
    covered = []
    for rank in range(size):
        own = runs(sections, size, rank)
        local = [e for run in own for e in range(run.local_start, run.local_start + run.length)]
        assert local == list(range(sum(s.divided(size, rank).length for s in sections)))
        covered += [e for run in own for e in range(run.start, run.start + run.length)]
    assert sorted(covered) == list(range(sum(s.length for s in sections)))


def test_a_shard_has_the_shape_that_its_runs_fill() -> None:
    table = ShardedParameter("wte", ("wte",), (31, 8), 0, (Section(1, 31, 1),), "vocabulary", 0)
    for size, rank in itertools.product([2, 4], [0, 1]):
        rows = sum(run.length for run in runs(table.sections, size, rank))
        assert table.local_shape(size, rank) == (rows, 8)
