"""Arrows go where the heat map has the next rank."""

import pytest

from boltmesh.tui.panels.heatmap import neighbour
from tests.tui.samples import demo, job, rank


@pytest.mark.parametrize(
    ("start", "across", "down", "there"),
    [
        (None, 1, 0, 0),
        (99, 0, 1, 0),
        (0, 1, 0, 1),
        (1, 1, 0, 2),
        (3, 1, 0, 3),
        (0, -1, 0, 0),
        (2, 0, 1, 6),
        (6, 0, 1, 6),
        (6, 0, -1, 2),
        (0, 3, 1, 7),
    ],
)
def test_the_mesh_is_walked_by_stages_and_along_them(
    start: int | None, across: int, down: int, there: int
) -> None:
    assert neighbour(demo().job, start, across, down) == there


def test_one_stage_is_one_row() -> None:
    flat = job(ranks=tuple(rank(number) for number in range(4)))
    assert neighbour(flat, 1, 0, 1) == 2
    assert neighbour(flat, 1, 0, -9) == 0


def test_stages_of_unequal_size_are_walked_all_the_same() -> None:
    ranks = [rank(n, coordinates={"pipeline": int(n > 2), "data": n % 3}) for n in range(5)]
    uneven = job(ranks=tuple(ranks), mesh={"pipeline": 2, "data": 3})
    assert neighbour(uneven, 2, 0, 1) == 4


def test_without_ranks_there_is_none() -> None:
    assert neighbour(job(ranks=()), None, 1, 0) is None
