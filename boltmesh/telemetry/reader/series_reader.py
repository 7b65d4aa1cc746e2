"""Follows the series of one rank's metrics: the logged ones, and the costs of each step.

The first look reads all slots of a series. Later ones read only the values that came since, from
the ring of the newest values, and ``MetricHistory`` adds only these to what snapshots have.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from boltmesh.telemetry import layout
from boltmesh.telemetry.layout import SECTIONS
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import MetricPoint, StepRecord

_SECTION: Final = SECTIONS["series"]
_SIZE: Final = _SECTION.record_bytes

Read = Callable[[int, int], bytes]
"""Reads from an offset a number of bytes; fewer at the end of the file."""

Point = tuple[int, int, float]
"""How many values had come with this one, its global step, the value."""

NamedPoint = tuple[str, Point]
"""Name of the metric, and a point of it."""


_SPARE_POINTS: Final = layout.POINTS_PER_SERIES + layout.RING_POINTS
"""Points by which a short history may grow before all points are read again."""


class _Newest(NamedTuple):
    """The newest value of a metric at the last look."""

    record: bytes
    point: Point | None
    """None while there is no valid one."""


class SeriesReader:
    """Reads the series of all metrics of one rank."""

    def __init__(self) -> None:
        self.damaged: set[tuple[int, int]] = set()
        """Metric and slot of invalid points."""
        self._newest: dict[str, _Newest] | None = None
        """By metric; None before all points were read."""

    def newest_values(self) -> dict[str, float]:
        """Return the newest value that was read of each metric."""
        newest = self._newest or {}
        return {name: each.point[2] for name, each in newest.items() if each.point}

    def read(
        self, read: Read, names: Sequence[str], *, is_whole: bool
    ) -> tuple[list[NamedPoint], bool]:
        """Return points with the names of their metrics, and whether these are all.

        Args:
            read: Reads the file.
            names: All metrics, in the order of the file.
            is_whole: Return all points; otherwise those since the last call, where the file still
                has each of them.
        """
        new = None if is_whole else self._read_new(read, names)
        return (self._read_all(read, names), True) if new is None else (new, False)

    def _read_new(self, read: Read, names: Sequence[str]) -> list[NamedPoint] | None:
        """Return the points since the last call; None where all slots have to be read."""
        if self._newest is None:
            return None
        new: list[NamedPoint] = []
        newest = dict(self._newest)
        for number, name in enumerate(names):
            base = _base(number)
            record = read(base, _SIZE)
            known = newest.get(name)
            if known is not None and record == known.record:
                continue
            if known is None or known.point is None or self._is_damaged(number):
                return None
            points = _read_since(read, base, known.point, record)
            if not points:
                return None
            new += [(name, point) for point in points]
            newest[name] = _Newest(record, points[-1])
        self._newest = newest
        return new

    def _read_all(self, read: Read, names: Sequence[str]) -> list[NamedPoint]:
        """Return the points of all slots, by metric, oldest first."""
        found: list[NamedPoint] = []
        newest: dict[str, _Newest] = {}
        for number, name in enumerate(names):
            content = read(_base(number), layout.POINTS_PER_SERIES * _SIZE)
            points = self._points(number, content)
            found += [(name, point) for point in points]
            newest[name] = _Newest(content[:_SIZE], points[-1] if points else None)
        self._newest = newest
        return found

    def _is_damaged(self, number: int) -> bool:
        return any(metric == number for metric, _ in self.damaged)

    def _points(self, number: int, content: bytes) -> list[Point]:
        by_count: dict[int, Point] = {}
        for slot in range(min(layout.POINTS_PER_SERIES, len(content) // _SIZE)):
            at = slot * _SIZE
            point = _point(content, at)
            if point is not None:
                by_count[point[0]] = point
                self.damaged.discard((number, slot))
            elif content[at : at + 8] != bytes(8):
                self.damaged.add((number, slot))
        return [by_count[count] for count in sorted(by_count)]


def _base(number: int) -> int:
    """Return where the series of a metric begins."""
    return _SECTION.offset + number * layout.POINTS_PER_SERIES * _SIZE


def _point(content: bytes, at: int) -> Point | None:
    point = layout.POINT.unpack(content, at)
    return point if point is not None and abs(point[1]) < 1 << 60 else None


def _read_since(read: Read, base: int, known: Point, newest: bytes) -> list[Point]:
    """Return the few values that came since; none where all slots have to be read."""
    last = _point(newest, 0)
    if last is None or not 0 < last[0] - known[0] <= layout.RING_POINTS:
        return []
    new = []
    for number in range(known[0], last[0] - 1):
        at = base + layout.series_ring_slot(0, number) * _SIZE
        point = _point(read(at, _SIZE), 0)
        if point is None or point[0] != number + 1:
            return []
        new.append(point)
    return [*new, last]


class MetricHistory:
    """The points of a rank's series as snapshots have them.

    Later looks append the new points, so that a viewer of a job reads these alone
    (``tui/state.py``). From time to time the points are read again, without those that the file no
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
        """With more points, all are read again."""

    def is_outdated(self, data_size: int) -> bool:
        """Return whether ``update`` has to have all points."""
        is_full = len(self._metrics) + len(self._trends) > self._most_points
        return is_full or data_size != self._data_size

    def update(
        self,
        points: Sequence[NamedPoint],
        steps: Sequence[StepRecord],
        data_size: int,
        *,
        is_whole: bool,
    ) -> tuple[tuple[MetricPoint, ...], tuple[MetricPoint, ...]]:
        """Return the points of all metrics, and those of the series that the recorder adds.

        Args:
            points: As ``SeriesReader.read`` returned them.
            steps: The newest steps, whose losses have no gaps.
            data_size: Ranks with batches of their own, by which tokens are multiplied.
            is_whole: Whether these are all points of the file, rather than new ones.
        """
        if is_whole:
            self._metrics, self._trends = [], []
            self._newest, self._data_size = None, data_size
        oldest = next((step.global_step for step in steps if step.loss is not None), None)
        for name, point in points:
            self._add(name, point, oldest)
        self._metrics += self._losses_since(steps)
        self._newest = steps[-1] if steps else None
        if is_whole:
            self._metrics.sort(key=lambda point: point.global_step)
            self._most_points = 2 * (len(self._metrics) + len(self._trends)) + _SPARE_POINTS
        return tuple(self._metrics), tuple(self._trends)

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
