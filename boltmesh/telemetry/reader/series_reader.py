"""Follows the series of one rank's metrics: the logged ones, and the costs of each step.

The first look reads all slots of a series. Later ones read only the values that came since, from
the ring of the newest values, and ``MetricHistory`` adds only these to what snapshots have.
"""

from collections.abc import Callable, Sequence
from typing import Final

from boltmesh.telemetry import layout
from boltmesh.telemetry.layout import SECTIONS
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import MetricPoint, StepRecord

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
        """Metric and slot of invalid points."""
        self._series: dict[str, _Series] = {}
        self._new: list[tuple[str, Point]] | None = None

    def points(self) -> dict[str, list[Point]]:
        """Return the points that are known, by metric, oldest first."""
        return {name: each.points for name, each in self._series.items()}

    def take_new(self) -> list[tuple[str, Point]] | None:
        """Return the points added since the last call; None where a series was read whole."""
        new, self._new = self._new, []
        return new

    def update(self, read: Callable[[int, int], bytes], names: Sequence[str]) -> bool:
        """Read new points; return whether there are any."""
        is_new = False
        for number, name in enumerate(names):
            series = self._series.setdefault(name, _Series())
            base = _SECTION.offset + number * layout.POINTS_PER_SERIES * _SIZE
            newest = read(base, _SIZE)
            if newest != series.newest:
                is_new = True
                is_damaged = any(metric == number for metric, _ in self.damaged)
                new = [] if is_damaged else _read_since(read, base, series.points, newest)
                if new:
                    self._add(name, series, new)
                else:
                    series.points = self._read_all(read, number, base)
                    self._new = None
                series.newest = newest
        return is_new

    def _add(self, name: str, series: _Series, new: list[Point]) -> None:
        series.points += new
        if len(series.points) > _MOST_POINTS:
            count = new[-1][0]
            series.points = [
                each for each in series.points if layout.is_in_series(each[0] - 1, count)
            ]
            self._new = None
        elif self._new is not None:
            self._new += [(name, point) for point in new]

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


def _read_since(
    read: Callable[[int, int], bytes], base: int, points: list[Point], newest: bytes
) -> list[Point]:
    """Return the few values that came since; none where all slots have to be read."""
    last = _point(newest, 0)
    if last is None or not points:
        return []
    known, count = points[-1][0], last[0]
    if not 0 < count - known <= layout.RING_POINTS:
        return []
    new = []
    for number in range(known, count - 1):
        at = base + layout.series_ring_slot(0, number) * _SIZE
        point = _point(read(at, _SIZE), 0)
        if point is None or point[0] != number + 1:
            return []
        new.append(point)
    return [*new, last]


class MetricHistory:
    """The points of a rank's series as snapshots have them.

    Later looks append the new points, so that a viewer of a job reads these alone
    (``tui/state.py``). From time to time the points are rebuilt without those that the file no
    longer has.
    """

    def __init__(self) -> None:
        self._metrics: list[MetricPoint] = []
        self._trends: list[MetricPoint] = []
        self._names: dict[str, str] = {}
        """Names as they are shown, by metric."""
        self._newest: StepRecord | None = None
        """The newest step whose loss is included."""
        self._data_size = 0
        self._most_points = 0
        """More points are rebuilt."""

    def update(
        self, series: SeriesReader, steps: Sequence[StepRecord], data_size: int
    ) -> tuple[tuple[MetricPoint, ...], tuple[MetricPoint, ...]]:
        """Return the points of all metrics, and those of the series that the recorder adds.

        Args:
            series: The rank's series, as they were read last.
            steps: The newest steps, whose losses have no gaps.
            data_size: Ranks with batches of their own, by which tokens are multiplied.
        """
        new = series.take_new()
        is_full = len(self._metrics) + len(self._trends) > self._most_points
        if new is None or is_full or data_size != self._data_size:
            self._metrics, self._trends = [], []
            self._newest, self._data_size = None, data_size
            new = [(name, each) for name, points in series.points().items() for each in points]
            self._extend(new, steps)
            self._metrics.sort(key=lambda point: point.global_step)
            self._most_points = 2 * (len(self._metrics) + len(self._trends)) + _MOST_POINTS
        else:
            self._extend(new, steps)
        return tuple(self._metrics), tuple(self._trends)

    def _extend(self, new: Sequence[tuple[str, Point]], steps: Sequence[StepRecord]) -> None:
        oldest = next((step.global_step for step in steps if step.loss is not None), None)
        for name, point in new:
            self._add(name, point, oldest)
        self._metrics += self._losses_since(steps)
        self._newest = steps[-1] if steps else None

    def _losses_since(self, steps: Sequence[StepRecord]) -> list[MetricPoint]:
        new: list[MetricPoint] = []
        for step in reversed(steps):
            if step is self._newest:
                break
            if step.loss is not None:
                new.append(MetricPoint("loss", step.global_step, step.loss))
        return new[::-1]

    def _add(self, name: str, point: Point, oldest_loss: int | None) -> None:
        _, global_step, value = point
        shown = self._names.get(name)
        if shown is None:
            shown = clean(name.removeprefix(layout.TREND), layout.MAX_NAME)
            self._names[name] = shown
        if name.startswith(layout.TREND):
            factor = self._data_size if name.endswith("tokens_per_s") else 1
            self._trends.append(MetricPoint(shown, global_step, factor * value))
        elif name != "loss" or oldest_loss is None or global_step < oldest_loss:
            self._metrics.append(MetricPoint(shown, global_step, value))
