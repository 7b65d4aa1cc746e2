"""Reads one rank's telemetry file, whatever state it is in.

The file is read, not mapped: a mapping of a file that somebody truncates kills the reader. Rings
are decoded as they grow, so that a second look costs only what is new.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout
from boltmesh.telemetry.job import open_private
from boltmesh.telemetry.layout import SECTIONS, Header, Record
from boltmesh.telemetry.liveness import is_alive

_LOOK_AHEAD: Final = 64
"""Damaged or unfinished records that a ring is followed across before all of it is searched."""

T = TypeVar("T")


class Group(msgspec.Struct, frozen=True):
    """A process group as the rank named it."""

    name: str
    axis: str


class Facts(msgspec.Struct, frozen=True):
    """The JSON block: names behind the numbers, and what is constant."""

    groups: list[Group] = []
    operators: list[str] = []
    metrics: list[str] = []
    host: str = ""
    device: str = ""
    device_uuid: str | None = None
    coordinates: dict[str, int] = {}
    communication_note: str | None = None
    expected: list[dict[str, Any]] = []
    checkpoint: str | None = None


class Status(NamedTuple):
    """Where the rank is."""

    state: str
    epoch: int
    global_step: int
    batch_index: int
    wall_s: float
    rss: int
    allocated: int
    reserved: int
    peak: int


class Step(NamedTuple):
    """A record of the ring ``steps``."""

    sequence: int
    batch_index: int
    global_step: int
    epoch: int
    flags: int
    wall_s: float
    total_ns: int
    phases_ns: tuple[int, ...]
    loss: float
    samples: int
    tokens: int


class Traffic(NamedTuple):
    """A record of the ring ``traffic``."""

    sequence: int
    step: int
    group: int
    operator: int
    phase: int
    flags: int
    unused: int
    in_group: int
    payload_bytes: int
    total_calls: int
    total_bytes: int
    enqueued_ns: int
    done_ns: int


class Ring(Generic[T]):
    """The records of one ring that are known so far, oldest first, by their sequence numbers.

    Args:
        name: The section.
        record: Its kind of record.
        make: Turns the fields, sequence number first, into what is kept.
        is_final: Whether a record is as it will stay. Others are read again every time.
    """

    def __init__(
        self,
        name: str,
        record: Record,
        make: Callable[[tuple[Any, ...]], T],
        is_final: Callable[[T], bool] = lambda _: True,
    ) -> None:
        self.records: dict[int, T] = {}
        self._section = SECTIONS[name]
        self._record = record
        self._make = make
        self._is_final = is_final
        self._newest = 0
        self._unfinished: list[int] = []

    def update(self, content: bytes) -> None:
        """Add what the writer added since the last call."""
        for sequence in self._unfinished:
            self._keep(self._record.unpack(content, layout.slot_offset(self._section, sequence)))
        self._follow(content)
        surplus = len(self.records) - self._section.capacity
        for sequence in list(self.records)[: max(0, surplus)]:
            del self.records[sequence]
        self._unfinished = [
            sequence
            for sequence in reversed(self.records)
            if not self._is_final(self.records[sequence])
        ][:_LOOK_AHEAD]

    def _follow(self, content: bytes) -> None:
        """Read on from the newest record, across a few that are not whole."""
        missing = 0
        sequence = self._newest + 1
        while missing < _LOOK_AHEAD:
            at = layout.slot_offset(self._section, sequence)
            claimed = layout.sequence_at(content, at)
            if claimed > sequence and layout.slot_offset(self._section, claimed) == at:
                self._search(content)
                return
            fields = self._record.unpack(content, at) if claimed == sequence else None
            missing = 0 if fields is not None else missing + 1
            self._keep(fields)
            sequence += 1

    def _search(self, content: bytes) -> None:
        """Look at every slot: the writer went round since the last call, or this is the first."""
        section = self._section
        found = []
        for slot in range(section.capacity):
            at = section.offset + slot * section.record_bytes
            sequence = layout.sequence_at(content, at)
            if sequence > self._newest and layout.slot_offset(section, sequence) == at:
                fields = self._record.unpack(content, at)
                if fields is not None:
                    found.append(fields)
        for fields in sorted(found, key=lambda fields: fields[0]):
            self._keep(fields)

    def _keep(self, fields: tuple[Any, ...] | None) -> None:
        if fields is not None and (fields[0] > self._newest or fields[0] in self.records):
            self.records[fields[0]] = self._make(fields)
            self._newest = max(self._newest, fields[0])


def _make_step(fields: tuple[Any, ...]) -> Step:
    head, phases, tail = fields[:7], fields[7:16], fields[16:]
    return Step._make((*head, phases, *tail))


class RankReader:
    """One rank's file, opened when it first appears and kept open when it goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._content = b""
        self._forget()

    def _forget(self) -> None:
        self.header: Header | None = None
        self.facts = Facts()
        self.status: Status | None = None
        self.phase = 0
        self.is_alive = False
        self.steps: Ring[Step] = Ring("steps", layout.STEP, _make_step)
        self.traffic: Ring[Traffic] = Ring("traffic", layout.TRAFFIC, Traffic._make, _is_done)
        self.events: Ring[tuple[float, str, str]] = Ring("events", layout.EVENT, _make_event)
        self._counters: dict[tuple[int, int], tuple[int, int]] = {}

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def peek(self) -> None:
        """Read only who wrote the file, where it is, and whether it lives."""
        self._open()
        self._look_for_life()
        self._read_status(self._read(SECTIONS["status"].end))

    def read(self) -> None:
        """Read all that is new.

        Raises:
            TelemetryError: There is no file that can be trusted; the text says why.
        """
        self._open()
        self._look_for_life()
        content = self._read(layout.FILE_BYTES)
        if len(content) < layout.FILE_BYTES:
            raise TelemetryError(f"it has {len(content)} bytes of {layout.FILE_BYTES}")
        self._content = content
        self._read_status(content)
        self._read_facts(content)
        self.steps.update(content)
        self.traffic.update(content)
        self.events.update(content)

    def _open(self) -> None:
        """Open the file, or the one that has taken its place: a job that began anew."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            if self._descriptor is None:
                raise TelemetryError("there is no file") from None
            return  # a cleaner removed it; what is open stays readable
        if self._descriptor is not None:
            ours = os.fstat(self._descriptor)
            if (ours.st_dev, ours.st_ino) == (found.st_dev, found.st_ino):
                return
            self.close()
            self._forget()
        try:
            self._descriptor = open_private(self.path)
        except OSError as error:
            raise TelemetryError(error.strerror or str(error)) from error

    def _read(self, size: int) -> bytes:
        assert self._descriptor is not None
        parts = []
        done = 0
        while done < size and (part := os.pread(self._descriptor, size - done, done)):
            parts.append(part)
            done += len(part)
        return b"".join(parts)

    def _look_for_life(self) -> None:
        """Ask before anything else is read, or a rank that ends meanwhile looks dead."""
        assert self._descriptor is not None
        self.header = layout.parse_header(self._read(layout.PAGE))
        self.is_alive = is_alive(self._descriptor, self.header)

    def _read_status(self, content: bytes) -> None:
        section = SECTIONS["status"]
        slots = [
            fields
            for slot in range(section.capacity)
            if (
                fields := layout.STATUS.unpack(
                    content, section.offset + slot * section.record_bytes
                )
            )
        ]
        if slots:
            _, state, _, _, *rest = max(slots)
            if state < len(layout.STATES):
                self.status = Status(layout.STATES[state], *rest)
                self.phase = content[layout.PHASE_OFFSET]

    def _read_facts(self, content: bytes) -> None:
        text = layout.unpack_names(content)
        if text is not None:
            try:
                self.facts = msgspec.json.decode(text, type=Facts)
            except msgspec.MsgspecError as error:
                raise TelemetryError(f"its names are damaged: {error}") from error

    def counters(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return calls and payload bytes by group and operator.

        The newest record of an operator has its totals; the table has those of operators whose
        records were overwritten. A total that is torn just now is the last whole one.
        """
        section = SECTIONS["counters"]
        found = self._counters
        for group in range(len(self.facts.groups)):
            for operator in range(len(self.facts.operators)):
                index = group * layout.MAX_OPERATORS + operator
                at = section.offset + index * section.record_bytes
                if fields := layout.COUNTER.unpack(self._content, at):
                    found[group, operator] = max(found.get((group, operator), (0, 0)), fields)
        for record in self.traffic.records.values():
            key = (record.group, record.operator)
            if record.total_calls > found.get(key, (0, 0))[0]:
                found[key] = (record.total_calls, record.total_bytes)
        return found

    def series(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return, by metric, (count, global step, value) of the points that are kept."""
        section = SECTIONS["series"]
        result: dict[str, list[tuple[Any, ...]]] = {}
        for number, name in enumerate(self.facts.metrics[: layout.MAX_METRICS]):
            base = section.offset + number * layout.POINTS_PER_SERIES * section.record_bytes
            points: dict[int, tuple[Any, ...]] = {}
            for slot in range(layout.POINTS_PER_SERIES):
                point = layout.POINT.unpack(self._content, base + slot * section.record_bytes)
                if point is not None:
                    points[point[0]] = point
            result[name] = [points[count] for count in sorted(points)]
        return result


def _is_done(record: Traffic) -> bool:
    return record.done_ns > 0 or not record.flags & layout.TRAFFIC_IS_TIMED


def _make_event(fields: tuple[Any, ...]) -> tuple[float, str, str]:
    _, wall_s, kind, _, length, text = fields
    name = layout.EVENT_KINDS[kind] if kind < len(layout.EVENT_KINDS) else "warning"
    return wall_s, name, text[:length].decode("utf-8", "replace")
