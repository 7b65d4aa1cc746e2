"""Rectangles of cells, and how a column of panels shares its height.

Panels that do not fit are left out by priority, never squeezed. ``plan_frame`` places the header,
the tabs and the keys of a screen around its panels.
"""

from collections.abc import Sequence
from typing import NamedTuple

GUTTER = 3
"""Blank columns between two panels side by side."""
WIDE = 100
"""Width from which on two columns of panels are of use."""
VERY_WIDE = 160
HEADINGS_FROM_HEIGHT = 24


class Region(NamedTuple):
    """A rectangle of cells."""

    x: int
    y: int
    width: int
    height: int

    def has(self, x: int, y: int) -> bool:
        """Say whether a cell lies within."""
        return self.x <= x < self.x + self.width and self.y <= y < self.y + self.height

    def split_off_top(self, height: int) -> tuple["Region", "Region"]:
        """Return the first ``height`` lines, as far as there are any, and what is below."""
        height = min(max(0, height), self.height)
        return (
            self._replace(height=height),
            self._replace(y=self.y + height, height=self.height - height),
        )

    def split(self, percent: int) -> tuple["Region", "Region"]:
        """Return a left and a right part with a gutter between them."""
        left = max(0, (self.width - GUTTER) * percent // 100)
        right = max(0, self.width - left - GUTTER)
        return self._replace(width=left), self._replace(x=self.x + left + GUTTER, width=right)


Plan = dict[str, Region]
"""The panels that are shown, by name: within the terminal, and never one over another."""


class Item(NamedTuple):
    """One panel of a column: at least ``least`` lines or none, ``ideal`` if possible."""

    panel: str
    least: int
    ideal: int
    priority: int = 1
    """The lowest is served first."""
    grows: bool = False
    """Takes the room that no other item wants."""


LEAST_SPARE = 7
"""Lines from which on the rest of a page is of use."""


def split_spare(body: Region, needed: int) -> tuple[Region, Region]:
    """Return the part that a table needs, and what is left below it; too little goes to it too."""
    if body.height - needed - 1 < LEAST_SPARE:
        return body, body._replace(y=body.y + body.height, height=0)
    table, rest = body.split_off_top(needed)
    return table, rest.split_off_top(1)[1]


def has_headings(height: int) -> bool:
    """Say whether a terminal of ``height`` lines has room for a rule above each panel."""
    return height >= HEADINGS_FROM_HEIGHT


def stack(region: Region, items: Sequence[Item]) -> Plan:
    """Place ``items`` below each other in their order; heights are given by priority."""
    if region.width < 1:
        return {}
    heights: dict[str, int] = {}
    left = region.height
    by_priority = sorted(items, key=lambda item: item.priority)
    for item in by_priority:
        if 0 < item.least <= left:
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
    plan: Plan = {}
    y = region.y
    for item in items:
        if size := heights.get(item.panel, 0):
            plan[item.panel] = Region(region.x, y, region.width, size)
            y += size
    return plan


MARGIN_FROM_WIDTH = 80
"""Width from which on a blank column is left at each side."""
HEADLINE_FROM_HEIGHT = 20
TABS_FROM_HEIGHT = 10
PROGRESS_FROM_HEIGHT = 7


class Frame(NamedTuple):
    """The frame's panels, and the room within it."""

    panels: Plan
    body: Region


def plan_frame(width: int, height: int, *, has_time: bool = False) -> Frame:
    """Place the header, the headline figures, the tabs, the time of a replay, and the keys.

    The lines that matter most are the last to go: the job's name, then the keys, then how far the
    job has come, then the tabs, for digits work without them, then the headline figures.
    """
    panels: Plan = {}
    if width < 1 or height < 1:
        return Frame(panels, Region(0, 0, 0, 0))
    margin = 1 if width >= MARGIN_FROM_WIDTH else 0
    rest = Region(margin, 0, width - 2 * margin, height)
    panels["header"], rest = rest.split_off_top(2 if height >= PROGRESS_FROM_HEIGHT else 1)
    if height >= HEADLINE_FROM_HEIGHT:
        panels["headline"], rest = rest.split_off_top(1)
    if has_time and height >= 3:
        panels["time"], rest = rest.split_off_top(1)
    if height >= TABS_FROM_HEIGHT:
        panels["tabs"], rest = rest.split_off_top(1)
    if height >= 4:
        rest = rest._replace(height=rest.height - 1)
        panels["keys"] = rest._replace(y=rest.y + rest.height, height=1)
    if has_headings(height):  # a blank line, for the tabs are no heading of what is below them
        _, rest = rest.split_off_top(1)
    return Frame(panels, rest)
