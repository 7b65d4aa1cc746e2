"""What every screen of a job has around its own panels: header, tabs, keys."""

from typing import NamedTuple

from boltmesh.tui.layout.region import Plan, Region, has_headings

MARGIN_FROM_WIDTH = 80
"""From here on a blank column is left at each side."""
TABS_FROM_HEIGHT = 10
PROGRESS_FROM_HEIGHT = 7


class Frame(NamedTuple):
    """The frame's panels, and the room within it."""

    panels: Plan
    body: Region


def plan_frame(width: int, height: int, *, has_time: bool = False) -> Frame:
    """Place the header, the tabs, the line of time of a replay, and the keys.

    The lines that matter most are the last to go: the job's name, then the keys, then how far the
    job has come, then the tabs, for digits work without them.
    """
    panels: Plan = {}
    if width < 1 or height < 1:
        return Frame(panels, Region(0, 0, 0, 0))
    margin = 1 if width >= MARGIN_FROM_WIDTH else 0
    rest = Region(margin, 0, width - 2 * margin, height)
    panels["header"], rest = rest.split_off_top(2 if height >= PROGRESS_FROM_HEIGHT else 1)
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
