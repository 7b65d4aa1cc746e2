"""Where the panels of the overview stand, from 1 x 1 cells up; no terminal needed.

Below 100 columns everything is one column. From 100 on the chart has the step and the throughput
beside it, from 160 on the metrics as well, and the lower half has two columns. What does not fit is
left out by priority, never squeezed to nonsense.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

Panel = Literal[
    "header",
    "status",
    "chart",
    "phases",
    "throughput",
    "metrics",
    "ranks",
    "communication",
    "events",
    "keys",
]

WIDE = 100
VERY_WIDE = 160
HEADINGS_FROM_HEIGHT = 24
GUTTER = 3


class Region(NamedTuple):
    """A rectangle of cells."""

    x: int
    y: int
    width: int
    height: int


class Contents(msgspec.Struct, frozen=True):
    """How much there is to show."""

    status_lines: int
    units: int
    """Lines of throughput: samples, tokens."""
    phases: int
    metrics: int
    ranks: int
    traffic: int
    events: int


class _Item(NamedTuple):
    """One panel of a column: never below ``least`` lines, ``ideal`` if possible, then maybe more."""

    panel: Panel
    least: int
    ideal: int
    priority: int
    """The lowest is served first."""
    grows: bool = False


def has_headings(height: int) -> bool:
    """Say whether a terminal of ``height`` lines has room for a rule above each panel."""
    return height >= HEADINGS_FROM_HEIGHT


def plan_overview(width: int, height: int, contents: Contents) -> Mapping[Panel, Region]:
    """Return the panels that are shown; they lie within the terminal and never overlap."""
    regions: dict[Panel, Region] = {}
    if width < 1 or height < 1:
        return regions
    header = 2 if height >= 6 else 1
    keys = 1 if height >= 4 else 0
    status = min(contents.status_lines, max(0, height - header - keys - 1))
    regions["header"] = Region(0, 0, width, header)
    if status:
        regions["status"] = Region(0, header, width, status)
    if keys:
        regions["keys"] = Region(0, height - 1, width, 1)
    title = 1 if has_headings(height) else 0
    # A blank line under the header, unless the status stands there already or lines are scarce.
    top = header + (status or title)
    body = Region(0, top, width, height - top - keys)
    if width < WIDE:
        _place_column(regions, body, _narrow_items(contents, title))
    else:
        _place_wide(regions, body, contents, title)
    return regions


def _narrow_items(contents: Contents, title: int) -> Sequence[_Item]:
    legend = 1 + (contents.phases > 4)
    return (
        _Item("chart", 4, 10, 4, grows=True),
        _Item("throughput", 1, contents.units, 3),
        _Item("phases", 1, 1 + legend + title, 2),
        _Item("ranks", title + 1 + min(2, contents.ranks), title + 1 + contents.ranks, 1),
        _Item("communication", title + 2, title + 1 + max(1, contents.traffic), 5),
        _Item("events", title + 1, title + min(8, max(1, contents.events)), 6, grows=True),
    )


def _place_wide(
    regions: dict[Panel, Region], body: Region, contents: Contents, title: int
) -> None:
    """Two rows: what the job achieves above, what its parts do below."""
    beside = title + 1 + contents.phases + title + contents.units
    ranks = title + 1 + contents.ranks
    traffic = title + 1 + max(1, contents.traffic)
    events = title + min(6, max(1, contents.events))
    is_very_wide = body.width >= VERY_WIDE
    few_events = min(events, title + 3)
    if is_very_wide:
        below, below_least = max(ranks, traffic + events), max(ranks, traffic + few_events)
    else:
        below, below_least = ranks + traffic + events, ranks + traffic + few_events
    # What stands beside the chart is shown whole if events can make room for it, and on a tall
    # terminal the chart does not take everything that is left.
    upper = max(body.height - below, min(beside, body.height - below_least))
    upper = min(upper, max(beside, body.height * 45 // 100))
    upper = max(upper, min(beside, 9, body.height // 2))
    _place_upper(regions, Region(body.x, body.y, body.width, upper), contents, title)
    lower = Region(body.x, body.y + upper, body.width, body.height - upper)
    ranks_item = _Item("ranks", title + 1 + min(2, contents.ranks), ranks, 1)
    rest = (
        _Item("communication", title + 2, traffic, 2),
        _Item("events", title + 1, events, 3, grows=True),
    )
    if is_very_wide:
        left, right = _split(lower, 60)
        _place_column(regions, left, (ranks_item._replace(grows=True),))
        _place_column(regions, right, rest)
    else:
        _place_column(regions, lower, (ranks_item, *rest))


def _place_upper(
    regions: dict[Panel, Region], upper: Region, contents: Contents, title: int
) -> None:
    chart, side = _split(upper, 60)
    if upper.width >= VERY_WIDE and contents.metrics:
        side, metrics = _split(side, 62)
        _place_column(regions, metrics, (_Item("metrics", 2, 2, 1, grows=True),))
    _place_column(regions, chart, (_Item("chart", 3, 3, 1, grows=True),))
    _place_column(
        regions,
        side,
        (
            _Item("phases", 1, title + 1 + contents.phases, 1, grows=True),
            _Item("throughput", 1, title + contents.units, 2),
        ),
    )


def _split(region: Region, percent: int) -> tuple[Region, Region]:
    """Return a left and a right part with a gutter between them."""
    left = (region.width - GUTTER) * percent // 100
    x = region.x + left + GUTTER
    return (
        region._replace(width=left),
        Region(x, region.y, region.width - left - GUTTER, region.height),
    )


def _place_column(
    regions: dict[Panel, Region], region: Region, items: Sequence[_Item]
) -> None:
    """Stack ``items`` in their order, with heights dealt out by priority."""
    heights: dict[Panel, int] = {}
    left = region.height
    by_priority = sorted(items, key=lambda item: item.priority)
    for item in by_priority:
        if item.least <= left:
            heights[item.panel] = item.least
            left -= item.least
    for item in by_priority:
        if item.panel in heights:
            more = min(left, max(0, item.ideal - item.least))
            heights[item.panel] += more
            left -= more
    growing = [item.panel for item in items if item.grows and item.panel in heights]
    for place, panel in enumerate(growing):
        more = left // (len(growing) - place)
        heights[panel] += more
        left -= more
    y = region.y
    for item in items:
        if size := heights.get(item.panel, 0):
            regions[item.panel] = Region(region.x, y, region.width, size)
            y += size
