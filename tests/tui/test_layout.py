"""The plans of the screens, by brute force over sizes and contents."""

import itertools

import msgspec
import pytest

from boltmesh.tui.layout.region import Item, Plan, Region, has_headings, plan_frame, stack
from boltmesh.tui.pages.overview import Contents, plan_overview

SIZES = [
    (width, height)
    for width in (*range(24), 59, 60, 61, 79, 80, 81, 99, 100, 101, 120, 159, 160, 161, 200, 300)
    for height in (*range(40), 45, 50, 60, 80, 100)
]
CONTENTS = [
    Contents(
        says=says,
        units=units,
        phases=phases,
        metrics=metrics,
        curves=metrics,
        heat=heat,
        spread=int(ranks > 1),
        ranks=ranks,
        traffic=traffic,
        events=events,
    )
    for says, units, phases, metrics, heat, ranks, traffic, events in (
        (0, 2, 7, 4, 5, 8, 2, 9),
        (6, 1, 1, 0, 1, 1, 0, 0),
        (1, 3, 9, 40, 14, 1024, 30, 256),
        (0, 1, 4, 1, 2, 2, 1, 3),
    )
]


def _overview(width: int, height: int, contents: Contents) -> Plan:
    frame = plan_frame(width, height)
    plan = plan_overview(width, frame.body, contents, title=int(has_headings(height)))
    return {**frame.panels, **plan}


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


def _check(plan: Plan, width: int, height: int) -> None:
    for region in plan.values():
        assert 0 <= region.x < region.x + region.width <= width, (width, height, plan)
        assert 0 <= region.y < region.y + region.height <= height, (width, height, plan)
    for left, right in itertools.combinations(plan.values(), 2):
        assert not _overlap(left, right), (width, height, plan)


@pytest.mark.parametrize("contents", CONTENTS)
def test_panels_lie_within_the_terminal_and_never_overlap(contents: Contents) -> None:
    for width, height in SIZES:
        _check(_overview(width, height, contents), width, height)


@pytest.mark.parametrize("has_time", [False, True])
def test_the_frame_and_its_body_share_the_terminal(has_time: bool) -> None:
    for width, height in SIZES:
        frame = plan_frame(width, height, has_time=has_time)
        body = frame.body
        plan = {**frame.panels, **({"body": body} if body.width and body.height else {})}
        _check(plan, width, height)
        if width and height:
            assert "header" in plan
        if width and height >= 3:
            assert ("time" in plan) is has_time


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 30), (200, 60), (300, 100)])
def test_everything_that_matters_is_on_a_terminal_of_usual_size(size: tuple[int, int]) -> None:
    plan = _overview(*size, CONTENTS[0])
    assert {"header", "tabs", "chart", "heat", "keys"} <= set(plan)
    assert "phases" in plan
    assert {"headline", "throughput"} & set(plan)
    if size >= (120, 30):
        assert {"communication", "events"} <= set(plan)


def test_communication_has_a_line_where_its_table_finds_no_room() -> None:
    contents = msgspec.structs.replace(CONTENTS[0], says=3, heat=3)
    assert _overview(80, 24, contents)["communication"].height == 2
    assert _overview(80, 24, msgspec.structs.replace(contents, says=0))["communication"].height > 3


def test_a_message_never_pushes_out_the_ranks() -> None:
    with_message = _overview(60, 15, CONTENTS[1])
    assert with_message["says"].height >= 3
    assert "heat" in with_message


def test_a_tall_terminal_leaves_no_blank_band_in_the_middle() -> None:
    plan = _overview(200, 100, CONTENTS[0])
    covered = set().union(*(_cells(region) for region in plan.values()))
    for y in range(5, 99):
        assert any((x, y) in covered for x in range(110)), y


def test_all_ranks_are_listed_where_they_fit() -> None:
    assert _overview(120, 45, CONTENTS[0])["ranks"].height == 8 + 2


def test_a_column_serves_the_lowest_priority_first_and_lets_one_grow() -> None:
    items = (Item("a", 2, 4, 2), Item("b", 3, 3, 1), Item("c", 2, 2, 3, grows=True))
    heights = [
        {name: region.height for name, region in stack(Region(0, 0, 9, height), items).items()}
        for height in (2, 3, 5, 7, 9, 20)
    ]
    assert heights == [
        {"a": 2},
        {"b": 3},
        {"a": 2, "b": 3},
        {"a": 2, "b": 3, "c": 2},
        {"a": 4, "b": 3, "c": 2},
        {"a": 4, "b": 3, "c": 13},
    ]


def test_a_region_is_split_with_a_gutter_and_never_below_nothing() -> None:
    left, right = Region(1, 2, 103, 9).split(60)
    assert (left, right) == (Region(1, 2, 60, 9), Region(64, 2, 40, 9))
    for width in range(6):
        parts = Region(0, 0, width, 1).split(50)
        assert all(part.width >= 0 for part in parts)
