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
MARGIN_FROM_WIDTH = 80
"""From here on a blank column is left at each side."""


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
    """One panel of a column: at least ``least`` lines or none, ``ideal`` if possible."""

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
    margin = 1 if width >= MARGIN_FROM_WIDTH else 0
    page = Region(margin, 0, width - 2 * margin, height)
    regions["header"] = page._replace(height=header)
    if status:
        regions["status"] = page._replace(y=header, height=status)
    if keys:
        regions["keys"] = page._replace(y=height - 1, height=1)
    title = 1 if has_headings(height) else 0
    # A blank line under the header, unless the status stands there already or lines are scarce.
    top = header + (status or title)
    body = page._replace(y=top, height=height - top - keys)
    if width < WIDE:
        _place_column(regions, body, _narrow_items(contents, title))
    else:
        _place_wide(regions, body, contents, title, is_very_wide=width >= VERY_WIDE)
    return regions


def _narrow_items(contents: Contents, title: int) -> Sequence[_Item]:
    legend = 1 + (contents.phases > 4)
    return (
        _Item("chart", 4, 10, 4, grows=True),
        _Item("throughput", 1, contents.units, 3),
        _Item("phases", 2, 1 + legend + title, 2),
        _Item("ranks", title + 1 + min(2, contents.ranks), title + 1 + contents.ranks, 1),
        _Item("communication", title + 2, title + 1 + max(1, contents.traffic), 5),
        _Item("events", title + 1, title + min(8, max(1, contents.events)), 6, grows=True),
    )


def _place_wide(
    regions: dict[Panel, Region],
    body: Region,
    contents: Contents,
    title: int,
    *,
    is_very_wide: bool,
) -> None:
    """Two rows: what the job achieves above, what its parts do below."""
    beside = title + 1 + contents.phases + title + contents.units
    ranks = title + 1 + contents.ranks
    traffic = title + 1 + max(1, contents.traffic)
    events = title + min(12, max(1, contents.events))
    few_events = min(events, title + 3)
    if is_very_wide:
        below, below_least = max(ranks, traffic + events), max(ranks, traffic + few_events)
    else:
        below, below_least = ranks + traffic + events, ranks + traffic + few_events
    # What stands beside the chart is shown whole if events can make room for it.
    upper = max(body.height - below, min(beside, body.height - below_least))
    upper = max(upper, min(beside, 9, body.height // 2))
    above = body._replace(height=upper)
    _place_upper(regions, above, contents, title, is_very_wide=is_very_wide)
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
    regions: dict[Panel, Region],
    upper: Region,
    contents: Contents,
    title: int,
    *,
    is_very_wide: bool,
) -> None:
    chart, side = _split(upper, 60)
    metrics_item = _Item("metrics", title + 1, title + contents.metrics, 3)
    if is_very_wide:
        side, metrics = _split(side, 62)
        _place_column(regions, metrics, (metrics_item,))
    _place_column(regions, chart, (_Item("chart", 3, 3, 1, grows=True),))
    phases = _Item("phases", 1, title + 1 + contents.phases, 1)
    throughput = _Item("throughput", 1, title + contents.units, 2)
    # The chart's heading has a metric's value already; the others may use what would stay blank.
    is_tall = side.height >= phases.ideal + throughput.ideal + title + 2
    _place_column(
        regions,
        side,
        (phases, throughput, *((metrics_item,) if is_tall and not is_very_wide else ())),
    )


def _split(region: Region, percent: int) -> tuple[Region, Region]:
    """Return a left and a right part with a gutter between them."""
    left = (region.width - GUTTER) * percent // 100
    x = region.x + left + GUTTER
    return (
        region._replace(width=left),
        Region(x, region.y, region.width - left - GUTTER, region.height),
    )


def _place_column(regions: dict[Panel, Region], region: Region, items: Sequence[_Item]) -> None:
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
