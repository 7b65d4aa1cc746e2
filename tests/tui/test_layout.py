"""The plan of the overview, by brute force over sizes and contents."""

import itertools

import pytest

from boltmesh.tui.layout import Contents, Region, plan_overview

SIZES = [
    (width, height)
    for width in (*range(24), 59, 60, 61, 79, 80, 81, 99, 100, 101, 120, 159, 160, 161, 200, 300)
    for height in (*range(40), 45, 50, 60, 80, 100)
]
CONTENTS = [
    Contents(
        status_lines=status_lines,
        units=units,
        phases=phases,
        metrics=metrics,
        ranks=ranks,
        traffic=traffic,
        events=events,
    )
    for status_lines, units, phases, metrics, ranks, traffic, events in (
        (0, 2, 7, 4, 8, 2, 9),
        (3, 1, 1, 0, 1, 0, 0),
        (1, 2, 9, 40, 1024, 30, 256),
        (0, 1, 4, 1, 2, 1, 3),
    )
]


def _cells(region: Region) -> set[tuple[int, int]]:
    return {
        (x, y)
        for x in range(region.x, region.x + region.width)
        for y in range(region.y, region.y + region.height)
    }


def _overlap(left: Region, right: Region) -> bool:
    return (
        left.x < right.x + right.width
        and right.x < left.x + left.width
        and left.y < right.y + right.height
        and right.y < left.y + left.height
    )


@pytest.mark.parametrize("contents", CONTENTS)
def test_panels_lie_within_the_terminal_and_never_overlap(contents: Contents) -> None:
    for width, height in SIZES:
        plan = plan_overview(width, height, contents)
        for region in plan.values():
            where = (width, height, plan)
            assert 0 <= region.x < region.x + region.width <= width, where
            assert 0 <= region.y < region.y + region.height <= height, where
        for left, right in itertools.combinations(plan.values(), 2):
            assert not _overlap(left, right), (width, height, plan)


@pytest.mark.parametrize("contents", CONTENTS)
def test_the_header_is_always_there(contents: Contents) -> None:
    for width, height in SIZES:
        if width and height:
            assert "header" in plan_overview(width, height, contents)


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 30), (200, 60), (300, 100)])
def test_everything_that_matters_is_on_a_terminal_of_usual_size(size: tuple[int, int]) -> None:
    plan = plan_overview(*size, CONTENTS[0])
    assert {"header", "chart", "phases", "throughput", "ranks", "communication", "keys"} <= set(
        plan
    )


def test_a_message_never_pushes_out_the_ranks() -> None:
    plan = plan_overview(60, 15, CONTENTS[0])
    with_message = plan_overview(60, 15, CONTENTS[1])
    assert with_message["status"].height == 3
    assert "ranks" in plan
    assert "ranks" in with_message


def test_a_tall_terminal_leaves_no_blank_band_in_the_middle() -> None:
    plan = plan_overview(200, 100, CONTENTS[0])
    covered = set().union(*(_cells(region) for region in plan.values()))
    for y in range(4, 99):
        assert any((x, y) in covered for x in range(100)), y


def test_all_ranks_are_shown_where_they_fit() -> None:
    assert plan_overview(120, 35, CONTENTS[0])["ranks"].height == 8 + 2
