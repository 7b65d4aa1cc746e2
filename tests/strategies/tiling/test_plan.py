"""Tiles cover every row once, and are no larger than allowed."""

import pytest

from boltmesh.strategies.tiling.plan import TilePlan


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 16, 31, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 13, 100])
def test_runs_cover_every_row_once(rows: int, ranks: int, max_rows: int) -> None:
    plan = TilePlan.of(rows, 12, ranks, 12 * max_rows)
    seen: list[int] = []
    for tile in range(plan.count):
        start, length = plan.piece(tile)
        assert 0 <= start < start + length <= plan.shard_rows
        assert ranks * length <= max(max_rows, ranks)
        for within, first, count in plan.runs(tile):
            assert within % length == 0
            assert within + count <= ranks * length
            owner = first // plan.shard_rows
            assert within == owner * length
            assert first == owner * plan.shard_rows + start
            seen += range(first, first + count)
    assert sorted(seen) == list(range(rows))


def test_tiles_are_alike() -> None:
    plan = TilePlan.of(100, 4, 1, 4 * 99)
    assert [plan.piece(tile)[1] for tile in range(plan.count)] == [50, 50]


def test_a_budget_below_one_row_takes_one_row_of_each_shard() -> None:
    plan = TilePlan.of(6, 1000, 2, 10)
    assert (plan.tile_rows, plan.count) == (1, 3)
