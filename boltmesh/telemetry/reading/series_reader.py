"""Reads the series of the metrics, of each only the points that came since the last look."""

from collections.abc import Callable, Sequence
from typing import Final

from boltmesh.telemetry import layout
from boltmesh.telemetry.layout import SECTIONS

_SECTION: Final = SECTIONS["series"]
_SIZE: Final = _SECTION.record_bytes

Point = tuple[int, int, float]
"""How many values had come with this one, its global step, the value."""


class _Series:
    """The points of one metric."""

    def __init__(self) -> None:
        self.newest = b""
        self.count = 0
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
                self._read(read, number, base, series)
                series.newest = newest
        return is_new

    def _read(
        self, read: Callable[[int, int], bytes], number: int, base: int, series: _Series
    ) -> None:
        content = read(base, layout.POINTS_PER_SERIES * _SIZE)
        found: dict[int, Point] = {}
        for slot in range(min(layout.POINTS_PER_SERIES, len(content) // _SIZE)):
            at = slot * _SIZE
            point = layout.POINT.unpack(content, at)
            if point is not None and abs(point[1]) < 1 << 60:
                found[point[0]] = point
                self.damaged.discard((number, slot))
            elif content[at : at + 8] != bytes(8):
                self.damaged.add((number, slot))
        series.points = [found[count] for count in sorted(found)]
