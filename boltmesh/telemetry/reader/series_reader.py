"""Follows the series of one rank's metrics: what is logged, and what each step costs.

The first look reads all slots of a series. Later ones read only the values that came since, from
the ring of the newest values.
"""

from collections.abc import Callable, Sequence
from typing import Final

from boltmesh.telemetry import layout
from boltmesh.telemetry.layout import SECTIONS

_SECTION: Final = SECTIONS["series"]
_SIZE: Final = _SECTION.record_bytes

Point = tuple[int, int, float]
"""How many values had come with this one, its global step, the value."""


_MOST_POINTS: Final = layout.POINTS_PER_SERIES + layout.RING_POINTS
"""Points kept of a series that is followed, before those go that the file has no more."""


class _Series:
    """The points of one metric."""

    def __init__(self) -> None:
        self.newest = b""
        self.points: list[Point] = []


class SeriesReader:
    """The points of all metrics of one rank."""

    def __init__(self) -> None:
        self.damaged: set[tuple[int, int]] = set()
        """Metric and slot of what is no point."""
        self._series: dict[str, _Series] = {}

    def points(self) -> dict[str, list[Point]]:
        """Return the points that are known, by metric, oldest first."""
        return {name: each.points for name, each in self._series.items()}

    def update(self, read: Callable[[int, int], bytes], names: Sequence[str]) -> bool:
        """Read what is new; return whether anything is."""
        is_new = False
        for number, name in enumerate(names):
            series = self._series.setdefault(name, _Series())
            base = _SECTION.offset + number * layout.POINTS_PER_SERIES * _SIZE
            newest = read(base, _SIZE)
            if newest != series.newest:
                is_new = True
                is_damaged = any(metric == number for metric, _ in self.damaged)
                if is_damaged or not _follow(read, base, series.points, newest):
                    series.points = self._read_all(read, number, base)
                series.newest = newest
        return is_new

    def _read_all(self, read: Callable[[int, int], bytes], number: int, base: int) -> list[Point]:
        """Return the points of all slots of a series."""
        content = read(base, layout.POINTS_PER_SERIES * _SIZE)
        found: dict[int, Point] = {}
        for slot in range(min(layout.POINTS_PER_SERIES, len(content) // _SIZE)):
            at = slot * _SIZE
            point = _point(content, at)
            if point is not None:
                found[point[0]] = point
                self.damaged.discard((number, slot))
            elif content[at : at + 8] != bytes(8):
                self.damaged.add((number, slot))
        return [found[count] for count in sorted(found)]


def _point(content: bytes, at: int) -> Point | None:
    point = layout.POINT.unpack(content, at)
    return point if point is not None and abs(point[1]) < 1 << 60 else None


def _follow(
    read: Callable[[int, int], bytes], base: int, points: list[Point], newest: bytes
) -> bool:
    """Add the few values that came since; return False where all slots have to be read."""
    last = _point(newest, 0)
    if last is None or not points:
        return False
    known, count = points[-1][0], last[0]
    if not 0 < count - known <= layout.RING_POINTS:
        return False
    new = []
    for number in range(known, count - 1):
        at = base + layout.series_ring_slot(0, number) * _SIZE
        point = _point(read(at, _SIZE), 0)
        if point is None or point[0] != number + 1:
            return False
        new.append(point)
    points += (*new, last)
    if len(points) > _MOST_POINTS:
        points[:] = [point for point in points if layout.is_in_series(point[0] - 1, count)]
    return True
