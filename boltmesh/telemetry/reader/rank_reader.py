"""Reads one rank's telemetry file, whatever state it is in.

The file is read, not mapped: a mapping of a file that another process truncates kills the reader.
Each look reads the page that always changes and a few bytes of each section, and only where those
have moved the rest of it: a thousand ranks are read each second by a small part of one core. Of
each metric's series ``SeriesReader`` reads only the points that came since the last look.

``Liveness`` finds whether the process that writes a file is alive, by two signs, because each fails
alone. The kernel releases the writer's ``flock`` when the process dies, whatever the reason, but a
descendant that inherited the descriptor keeps it. A pid with its start time names one process for
good, but only within its own pid namespace and where there is a ``/proc``.
"""

import fcntl
import functools
import os
import resource
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.process import start_ticks
from boltmesh.telemetry import layout
from boltmesh.telemetry.job import open_private, pid_namespace
from boltmesh.telemetry.layout import SECTIONS, Header
from boltmesh.telemetry.reader.file_records import (
    MAX_NUMBER,
    Line,
    OffloadRow,
    Span,
    Status,
    StepRow,
    is_final,
    make_line,
    make_moved,
    make_span,
    make_status,
    make_step,
    make_traffic,
)
from boltmesh.telemetry.reader.ring import Change, Ring
from boltmesh.telemetry.reader.series_reader import NamedPoint, SeriesReader
from boltmesh.telemetry.reader.traffic_reader import TrafficReader
from boltmesh.telemetry.stall import RECENT_STEPS

CHECK_PID_EVERY_S: Final = 3.0
"""Interval at which the pid of a living process is checked: it may be a zombie, or reused."""


class Liveness:
    """Checks again and again whether one writer lives.

    Args:
        header: The header of its file.
    """

    def __init__(self, header: Header) -> None:
        self._header = header
        self._is_ours = False
        self._checked_s = -CHECK_PID_EVERY_S

    def is_alive(self, descriptor: int) -> bool:
        """Return whether the writer of an open telemetry file lives."""
        if not _is_locked(descriptor):
            return False
        header = self._header
        is_our_namespace = header.pid_namespace != 0 and header.pid_namespace == _namespace(
            os.getpid()
        )
        if not (is_our_namespace and header.start_ticks):
            return True
        now = time.monotonic()
        if now - self._checked_s >= CHECK_PID_EVERY_S:
            self._checked_s = now
            self._is_ours = start_ticks(header.pid) == header.start_ticks
        return self._is_ours and _exists(header.pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


@functools.lru_cache(maxsize=1)
def _namespace(pid: int) -> int:
    """Return this process's pid namespace, which stays while its pid does."""
    return pid_namespace()


def is_written(path: Path) -> bool:
    """Tell whether a process has a telemetry file open to write it."""
    descriptor = open_private(path)
    try:
        return _is_locked(descriptor)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Try a shared lock for an instant; a writer that starts just then tries again."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


_STATUS: Final = SECTIONS["status"]
_MEMORY: Final = SECTIONS["memory"]
_NAMES: Final = SECTIONS["names"]

_NUM_KEPT_TRAFFIC: Final = 256
"""Records of collectives that are kept beside the sums, for those in flight."""


class GroupRecord(msgspec.Struct, frozen=True):
    """A process group as the rank named it."""

    name: str
    axis: str
    members: list[tuple[int, int, int]] = []


class Facts(msgspec.Struct, frozen=True):
    """The JSON block: names of the numbers, and constants."""

    groups: list[GroupRecord] = []
    operators: list[str] = []
    metrics: list[str] = []
    host: str = ""
    device: str = ""
    device_uuid: str | None = None
    coordinates: dict[str, int] = {}
    communication_note: str | None = None
    expected: list[dict[str, Any]] = []
    expected_memory: list[dict[str, Any]] = []
    flops_per_batch: float | None = None
    recomputed_flops_per_batch: float | None = None
    peak_flops_per_second: float | None = None
    checkpoint: str | None = None
    chosen_strategy: str | None = None
    live_microbatches: list[tuple[int, int]] = []


class RankReader:
    """One rank's file, opened when it first appears and kept open when it goes.

    Args:
        path: Where it is.
        keep_steps: How many of the newest steps are kept.
        keep_spans: How many of the newest pipeline chunks are kept.
        is_brief: Read no more than that needs, and leave the rest unchecked: of very many ranks.
        num_recent: How many optimizer steps the means of collectives are over.
        most_behind: As in ``TrafficReader``.
    """

    num_open = 0
    """Descriptors that all readers of this process keep."""

    def __init__(
        self,
        path: Path,
        *,
        keep_steps: int | None = None,
        keep_spans: int | None = None,
        is_brief: bool = False,
        num_recent: int = RECENT_STEPS,
        most_behind: int | None = None,
    ) -> None:
        self.path = path
        self._name = os.fspath(path)
        self._keep_steps, self._keep_spans = keep_steps, keep_spans
        self._is_brief = is_brief
        self._num_recent, self._most_behind = num_recent, most_behind
        self._descriptor: int | None = None
        self._is_kept = False
        self._forget()

    def _forget(self) -> None:
        self.header: Header | None = None
        self.facts = Facts()
        self.status: Status | None = None
        self.memory: tuple[int, ...] | None = None
        self.phase = 0
        self.is_alive = False
        brief = self._is_brief
        self.steps: Ring[StepRow] = Ring(
            "steps", layout.STEP, make_step, keep=self._keep_steps, is_brief=brief
        )
        self.spans: Ring[Span] = Ring(
            "spans", layout.SPAN, make_span, keep=self._keep_spans, is_brief=brief
        )
        self.events: Ring[Line] = Ring("events", layout.EVENT, make_line, is_brief=brief)
        self.traffic = TrafficReader(
            Ring(
                "traffic",
                layout.TRAFFIC,
                make_traffic,
                keep=_NUM_KEPT_TRAFFIC,
                is_followed_further=True,
                is_brief=brief,
                is_final=is_final,
            ),
            num_recent=self._num_recent,
            most_behind=self._most_behind,
        )
        self.offload: Ring[OffloadRow] = Ring(
            "offload", layout.OFFLOAD, make_moved, keep=self._num_recent + 1, is_brief=brief
        )
        self.series = SeriesReader()
        self.new_steps: list[Change[StepRow]] = []
        self.changed: set[str] = {"all"}
        """Sections that differ from the look before; ``all`` of a file seen first."""
        self.damaged: set[str] = set()
        self._liveness: Liveness | None = None
        self._head = b""
        self._status_page = b""
        self._has_skipped = False
        self._names_sequence = 0
        self._identity: tuple[int, int] | None = None

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            if self._is_kept:
                self._is_kept = False
                RankReader.num_open -= 1

    def peek(self) -> None:
        """Read only the identity of the writer, the rank's position, and whether it lives."""
        try:
            self._open()
            self._read_first_page()
        finally:
            self._let_go()

    def read(self, *, is_quick: bool = False) -> None:
        """Read all that is new.

        Args:
            is_quick: For a living rank, read only its position, its steps and its events; the rest
                at the next look.

        Raises:
            TelemetryError: There is no file that can be trusted; the text says why.
        """
        try:
            is_new = self._open()
            self.changed = {"all"} if is_new else set()
            self._read_first_page()
            size = os.fstat(self._fd).st_size
            if size < layout.FILE_BYTES:
                raise TelemetryError(f"it has {size} bytes of {layout.FILE_BYTES}")
            self._read_facts()
            self.new_steps = self.steps.update(self.read_at)
            self.traffic.follow_steps(self.new_steps)
            if self.new_steps:
                self.changed.add("steps")
            if self.events.update(self.read_at):
                self.changed.add("events")
            if is_quick and self.is_alive:
                self._has_skipped = True
                return
            if self.spans.update(self.read_at):
                self.changed.add("spans")
            if self.offload.update(self.read_at):
                self.changed.add("offload")
            counted = self.status.counted if self.status is not None else 0
            if self.traffic.update(
                self.read_at,
                counted,
                num_named=(len(self.facts.groups), len(self.facts.operators)),
                is_fresh="status" in self.changed or self._has_skipped,
            ):
                self.changed.add("traffic")
            self._has_skipped = False
        finally:
            self._let_go()

    @property
    def num_damaged(self) -> int:
        """Records among those read that are not whole, or hold impossible values."""
        rings = (self.steps, self.spans, self.events, self.offload, self.traffic.ring)
        in_tables = len(self.traffic.damaged) + len(self.series.damaged) + len(self.damaged)
        return sum(len(each.damaged) for each in rings) + in_tables

    def read_events(self) -> list[Line]:
        """Read the lines that the rank wrote for humans, and return them all."""
        try:
            self._open()
            self.events.update(self.read_at)
            return list(self.events.records.values())
        finally:
            self._let_go()

    def read_series(self, *, is_whole: bool = False) -> tuple[list[NamedPoint], bool]:
        """Return points of the metrics' series, as ``SeriesReader.read`` does."""
        try:
            self._open()
            names = self.facts.metrics[: layout.MAX_METRICS]
            return self.series.read(self.read_at, names, is_whole=is_whole)
        finally:
            self._let_go()

    @property
    def _fd(self) -> int:
        assert self._descriptor is not None
        return self._descriptor

    def read_at(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes at an offset; fewer at the end of the file."""
        part = os.pread(self._fd, size, offset)
        while len(part) < size and (
            more := os.pread(self._fd, size - len(part), offset + len(part))
        ):
            part += more
        return part

    def _open(self) -> bool:
        """Open the file, or the one that has taken its place; return whether it is another one."""
        try:
            found = os.lstat(self._name)
        except FileNotFoundError:
            if self._descriptor is None:
                raise TelemetryError("there is no file") from None
            return False  # a cleaner removed it; what is open stays readable
        identity = (found.st_dev, found.st_ino)
        is_new = identity != self._identity
        if is_new:
            self.close()
            self._forget()
        if self._descriptor is None:
            try:
                self._descriptor = open_private(self.path)
            except OSError as error:
                raise TelemetryError(error.strerror or str(error)) from error
            opened = os.fstat(self._descriptor)
            self._identity = (opened.st_dev, opened.st_ino)
            if RankReader.num_open < most_open():
                self._is_kept = True
                RankReader.num_open += 1
        return is_new

    def _let_go(self) -> None:
        """Close a file to stay within the limit of open files."""
        if not self._is_kept:
            self.close()

    def _read_first_page(self) -> None:
        """Read the header and the status, and ask before anything else whether the rank lives."""
        page = self.read_at(0, _STATUS.end)
        if len(page) < _STATUS.end:
            layout.parse_header(page[: layout.PAGE])
            raise TelemetryError(f"it has {len(page)} bytes of {layout.FILE_BYTES}")
        head = page[: layout.PHASE_OFFSET]
        if head != self._head or self.header is None:
            self.header = layout.parse_header(page[: layout.PAGE])
            self._head = head
            self._liveness = Liveness(self.header)
        assert self._liveness is not None
        lives = self._liveness.is_alive(self._fd)
        phase = page[layout.PHASE_OFFSET]
        if (lives, phase) != (self.is_alive, self.phase):
            self.is_alive, self.phase = lives, phase
            self.changed.add("phase")
        slots = page[_STATUS.offset :]
        if slots != self._status_page:
            self._status_page = slots
            self._read_status(slots)
            self._read_memory()
        newest = layout.NEWEST_STEP.unpack(page, layout.NEWEST_STEP_OFFSET)
        status = self.status
        if newest and status and status.global_step < newest[0] <= MAX_NUMBER:
            self.status = status._replace(global_step=newest[0])
            self.changed.add("status")

    def _read_status(self, slots: bytes) -> None:
        self.changed.add("status")
        self.damaged.discard("status")
        fields = _newest(slots, _STATUS, layout.STATUS)
        status = make_status(fields) if fields is not None else None
        if status is not None:
            self.status = status
        elif slots.strip(b"\0"):
            self.damaged.add("status")

    def _read_memory(self) -> None:
        slots = self.read_at(_MEMORY.offset, _MEMORY.end - _MEMORY.offset)
        self.damaged.discard("memory")
        fields = _newest(slots, _MEMORY, layout.MEMORY)
        if fields is not None:
            self.memory = fields[1:]
        elif slots.strip(b"\0"):
            self.damaged.add("memory")

    def _read_facts(self) -> None:
        following = layout.slot_offset(_NAMES, self._names_sequence + 1)
        claim = self.read_at(following, 8)
        if self._names_sequence and int.from_bytes(claim, "little") <= self._names_sequence:
            return
        found = layout.newest_names(self.read_at(_NAMES.offset, _NAMES.end - _NAMES.offset))
        self.damaged.discard("names")
        if found is None:
            if claim.strip(b"\0"):
                self.damaged.add("names")
            return
        sequence, text = found
        if sequence == self._names_sequence:
            self.damaged.add("names")
            return
        try:
            self.facts = msgspec.json.decode(text, type=Facts)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise TelemetryError(f"its names are damaged: {error}") from error
        self._names_sequence = sequence
        self.changed.add("facts")


def _newest(slots: bytes, section: layout.Section, record: layout.Record) -> tuple[Any, ...] | None:
    """Return the newest whole record of a section that is written in turn."""
    whole = [
        fields
        for slot in range(section.capacity)
        if (fields := record.unpack(slots, slot * section.record_bytes))
    ]
    return max(whole, key=lambda fields: fields[0]) if whole else None


def most_open() -> int:
    """Return how many files may stay open: half of the process's limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft // 2 if soft > 0 else 1 << 16
