"""Writes one rank's telemetry file: no thread, no system call, about a microsecond a record.

A record is packed, sealed and copied into the mapped file; the kernel owns the pages from then
on, so a rank that is killed leaves everything up to its last record. The blocks are allocated
when the file is made, because a mapped file on a full disk does not raise: it kills the process.

The file is locked for as long as the writer lives. The kernel lets go of the lock at death, which
is how a reader knows (see ``liveness.py``). A forked child (a data-loader worker) drops the
mapping at once, so that it neither writes nor keeps the lock alive.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Final

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout
from boltmesh.telemetry.job import open_private, pid_namespace, process_start_ticks
from boltmesh.telemetry.layout import SECTIONS, Header

OTHERS: Final = "(others)"
TOUCH_EVERY_NS: Final = 60_000_000_000
_LOCK_ATTEMPTS: Final = 20
_LOCK_PAUSE_S: Final = 0.005

_TRAFFIC_AT: Final = SECTIONS["traffic"].offset
_TRAFFIC_BYTES: Final = SECTIONS["traffic"].record_bytes
_TRAFFIC_CAPACITY: Final = SECTIONS["traffic"].capacity
_COUNTERS_AT: Final = SECTIONS["counters"].offset
_COUNTER_BYTES: Final = SECTIONS["counters"].record_bytes

_writers: "weakref.WeakSet[RankFile]" = weakref.WeakSet()


class RankFile:
    """The telemetry file of this rank, open for writing.

    Every method but ``close`` may be called from any thread. After ``close``, and in a forked
    child, all of them do nothing.

    Args:
        path: From ``rank_file``. A file of an earlier process is replaced; one that this very
            process wrote (fit, then test, under one job id) is continued.
        rank: Global rank.
        world_size: Ranks of the job.
    """

    def __init__(self, path: Path, *, rank: int, world_size: int) -> None:
        self.path = path
        self._lock = Lock()
        self._sequences = dict.fromkeys(("steps", "traffic", "spans", "events"), 0)
        self._status_sequence = 0
        self._names_sequence = 0
        self._names: dict[str, Any] = {"groups": [], "operators": [], "metrics": []}
        self._numbers: dict[str, dict[str, int]] = {"operators": {}, "metrics": {}}
        self._groups: dict[str, int] = {}
        self._counters: dict[tuple[int, int], list[int]] = {}
        self._unwritten: set[tuple[int, int]] = set()
        self._group_sequences = [0] * layout.MAX_GROUPS
        self._series_counts = [0] * layout.MAX_METRICS
        self._series_strides = [1] * layout.MAX_METRICS
        self._pid = os.getpid()
        ours = (self._pid, process_start_ticks(self._pid), pid_namespace())
        self._map: mmap.mmap | None
        self._descriptor, self._map, self.header = _open(path, ours, rank, world_size)
        self._touched_ns = time.monotonic_ns()
        self._restore()
        _writers.add(self)

    @property
    def is_open(self) -> bool:
        """Whether what is recorded still goes into the file."""
        return self._map is not None

    @property
    def num_steps(self) -> int:
        """Steps that were ever written here."""
        return self._sequences["steps"]

    def close(self) -> None:
        """Unmap the file and let go of its lock; what was written stays."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._write_counters()
        mapping, self._map = self._map, None
        if mapping is not None:
            mapping.close()
            os.close(self._descriptor)

    # Names

    def write_facts(self, facts: Mapping[str, object]) -> None:
        """Keep what is constant, or rarely changes: coordinates, device, expected traffic."""
        with self._lock:
            self._names.update(facts)
            self._write_names()

    def group_number(self, name: str, axis: str) -> int:
        """Return the number of a process group, whose axis may become known later."""
        with self._lock:
            known = self._names["groups"]
            number = self._groups.get(name)
            if number is None:
                number = min(len(known), layout.MAX_GROUPS - 1)
                self._groups[name] = number
                if len(known) == layout.MAX_GROUPS:
                    if known[-1]["name"] == OTHERS:
                        return number
                    name, axis = OTHERS, "other"
                    known.pop()
                known.append({"name": name[: layout.MAX_NAME], "axis": axis})
            elif known[number]["axis"] == axis or known[number]["name"] == OTHERS:
                return number
            known[number]["axis"] = axis[: layout.MAX_NAME]
            self._write_names()
            return number

    def operator_number(self, name: str) -> int:
        """Return the number of an operator."""
        with self._lock:
            return self._number("operators", name, layout.MAX_OPERATORS)

    def _number(self, kind: str, name: str, limit: int) -> int:
        numbers = self._numbers[kind]
        number = numbers.get(name)
        if number is not None:
            return number
        names: list[str] = self._names[kind]
        number = min(len(names), limit - 1)
        numbers[name] = number
        if len(names) < limit:
            names.append(name[: layout.MAX_NAME])
        elif names[-1] != OTHERS:
            names[-1] = OTHERS
        self._write_names()
        return number

    def _write_names(self) -> None:
        if self._map is None:
            return
        self._names_sequence += 1
        section = SECTIONS["names"]
        sealed = layout.pack_names(self._names_sequence, msgspec.json.encode(self._names))
        at = layout.slot_offset(section, self._names_sequence)
        self._map[at : at + len(sealed)] = sealed

    # Records

    def status(self, *fields: float) -> None:
        """Write where the rank is; the fields are those of ``layout.STATUS``."""
        with self._lock:
            if self._map is None:
                return
            self._status_sequence += 1
            section = SECTIONS["status"]
            at = layout.slot_offset(section, self._status_sequence)
            self._map[at : at + section.record_bytes] = layout.STATUS.pack(
                self._status_sequence, *fields
            )

    def phase(self, index: int) -> None:
        """Write the phase that the rank is in: one byte, which nobody sees half written."""
        if self._map is not None:
            self._map[layout.PHASE_OFFSET] = index

    def step(self, *fields: float) -> int:
        """Append a step; return its sequence number."""
        return self._append("steps", layout.STEP, *fields)

    def span(self, *fields: int) -> int:
        """Append a pipeline chunk."""
        return self._append("spans", layout.SPAN, *fields)

    def event(self, kind: str, message: str) -> None:
        """Append a line for a human, cut to what fits."""
        text = message.encode(errors="replace")[: layout.MAX_MESSAGE]
        number = layout.EVENT_KINDS.index(kind)
        self._append("events", layout.EVENT, time.time(), number, 0, len(text), text)

    def point(self, name: str, global_step: int, value: float) -> None:
        """Add a value to a metric's series, see ``layout.series_stride``."""
        with self._lock:
            number = self._number("metrics", name, layout.MAX_METRICS)
            if self._map is None:
                return
            section = SECTIONS["series"]
            size = section.record_bytes
            base = section.offset + number * layout.POINTS_PER_SERIES * size
            before = self._series_counts[number]
            self._series_counts[number] = before + 1
            sealed = layout.POINT.pack(before + 1, global_step, value)
            self._map[base : base + size] = sealed
            stride = self._series_strides[number]
            if before % stride:
                return
            position = before // stride
            if position == layout.POINTS_PER_SERIES - 1:
                self._halve(base + size, size)
                self._series_strides[number] = layout.series_stride(before + 1)
                if before % self._series_strides[number]:
                    return
                position = before // self._series_strides[number]
            at = base + (1 + position) * size
            self._map[at : at + size] = sealed

    def _halve(self, base: int, size: int) -> None:
        """Keep every second point; what lies behind them stays until it is written over."""
        assert self._map is not None
        for position in range(1, layout.POINTS_PER_SERIES // 2):
            source, target = base + 2 * position * size, base + position * size
            self._map[target : target + size] = self._map[source : source + size]

    def enqueue(
        self, step: int, group: int, operator: int, phase: int, flags: int, payload_bytes: int
    ) -> tuple[int, ...]:
        """Count a collective and append its record; return what ``complete`` needs."""
        with self._lock:
            key = (group, operator)
            counter = self._counters.get(key)
            if counter is None:
                counter = self._counters[key] = [0, 0]
            counter[0] += 1
            counter[1] += payload_bytes
            self._unwritten.add(key)
            in_group = self._group_sequences[group] = self._group_sequences[group] + 1
            sequence = self._sequences["traffic"] = self._sequences["traffic"] + 1
            ticket = (
                sequence,
                step,
                group,
                operator,
                phase,
                flags,
                0,
                in_group,
                payload_bytes,
                counter[0],
                counter[1],
                time.monotonic_ns(),
            )
            if self._map is not None:
                at = _TRAFFIC_AT + (sequence - 1) % _TRAFFIC_CAPACITY * _TRAFFIC_BYTES
                self._map[at : at + _TRAFFIC_BYTES] = layout.TRAFFIC.pack(*ticket, 0)
                if sequence % (_TRAFFIC_CAPACITY // 2) == 0:
                    self._write_counters()  # before the ring has forgotten what they lack
            return ticket

    def write_counters(self) -> None:
        """Write the totals of the operators that were called since the last time."""
        if self._unwritten:
            with self._lock:
                self._write_counters()

    def _write_counters(self) -> None:
        while self._unwritten:
            key = self._unwritten.pop()
            if self._map is not None:
                at = _COUNTERS_AT + (key[0] * layout.MAX_OPERATORS + key[1]) * _COUNTER_BYTES
                self._map[at : at + _COUNTER_BYTES] = layout.COUNTER.pack(*self._counters[key])

    def complete(self, ticket: tuple[int, ...], done_ns: int) -> None:
        """Record when a collective was done."""
        sequence = ticket[0]
        with self._lock:
            is_kept = self._sequences["traffic"] - sequence < _TRAFFIC_CAPACITY
            if self._map is not None and is_kept:
                at = _TRAFFIC_AT + (sequence - 1) % _TRAFFIC_CAPACITY * _TRAFFIC_BYTES
                self._map[at : at + _TRAFFIC_BYTES] = layout.TRAFFIC.pack(*ticket, done_ns)

    def lose(self, ticket: tuple[int, ...]) -> None:
        """Record that the completion of a collective will not be known."""
        sequence, step, group, operator, phase, flags, *rest = ticket
        with self._lock:
            if self._map is not None:
                at = layout.slot_offset(SECTIONS["traffic"], sequence)
                flags &= ~layout.TRAFFIC_IS_TIMED
                sealed = layout.TRAFFIC.pack(
                    sequence, step, group, operator, phase, flags, *rest, 0
                )
                self._map[at : at + len(sealed)] = sealed

    def _append(self, name: str, record: layout.Record, *fields: object) -> int:
        with self._lock:
            self._sequences[name] += 1
            sequence = self._sequences[name]
            if self._map is not None:
                at = layout.slot_offset(SECTIONS[name], sequence)
                self._map[at : at + record.size] = record.pack(sequence, *fields)
            return sequence

    def touch(self) -> None:
        """Renew the file's time once a minute, for writing through a mapping does not.

        Cleaners of temporary folders remove what nobody has changed for days.
        """
        now = time.monotonic_ns()
        if now - self._touched_ns >= TOUCH_EVERY_NS and self._map is not None:
            self._touched_ns = now
            os.utime(self._descriptor)

    def _restore(self) -> None:
        """Take up the numbers where this process left them, when it opens its file again."""
        content = os.pread(self._descriptor, layout.FILE_BYTES, 0)
        text = layout.unpack_names(content)
        if text is None:
            return
        self._names = msgspec.json.decode(text)
        self._groups = {each["name"]: at for at, each in enumerate(self._names["groups"])}
        for kind in self._numbers:
            self._numbers[kind] = {name: at for at, name in enumerate(self._names[kind])}
        for name, record in (
            ("steps", layout.STEP),
            ("traffic", layout.TRAFFIC),
            ("spans", layout.SPAN),
            ("events", layout.EVENT),
        ):
            self._sequences[name] = layout.newest_sequence(content, SECTIONS[name], record)
        self._status_sequence = layout.newest_sequence(content, SECTIONS["status"], layout.STATUS)
        self._names_sequence = max(
            layout.sequence_at(content, layout.slot_offset(SECTIONS["names"], slot))
            for slot in (1, 2)
        )
        counters = SECTIONS["counters"]
        for index in range(counters.capacity):
            at = counters.offset + index * counters.record_bytes
            if values := layout.COUNTER.unpack(content, at):
                self._counters[divmod(index, layout.MAX_OPERATORS)] = list(values)
        traffic = SECTIONS["traffic"]
        for slot in range(traffic.capacity):
            at = traffic.offset + slot * traffic.record_bytes
            if values := layout.TRAFFIC.unpack(content, at):
                counter = self._counters.setdefault(values[2:4], [0, 0])
                if values[9] > counter[0]:
                    counter[:] = values[9:11]
        for (group, _), counter in self._counters.items():
            self._group_sequences[group] += counter[0]
        series = SECTIONS["series"]
        for number in range(len(self._names["metrics"])):
            at = series.offset + number * layout.POINTS_PER_SERIES * series.record_bytes
            if point := layout.POINT.unpack(content, at):
                self._series_counts[number] = point[0]
                self._series_strides[number] = layout.series_stride(point[0])


def _open(
    path: Path, ours: tuple[int, int, int], rank: int, world_size: int
) -> tuple[int, mmap.mmap, Header]:
    """Continue this process's own file, or make a new one in the place of a dead process's."""
    if os.path.lexists(path):
        earlier = _open_earlier(path, ours)
        if earlier is not None:
            return earlier
    descriptor = _create(path)
    try:
        mapping = mmap.mmap(descriptor, layout.FILE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    header = Header(*ours, rank, world_size, time.time(), time.monotonic_ns())
    mapping[: layout.PAGE] = header.pack()
    return descriptor, mapping, header


def _open_earlier(path: Path, ours: tuple[int, int, int]) -> tuple[int, mmap.mmap, Header] | None:
    os.close(open_private(path))  # refuses links and files of others before it is opened to write
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _lock(descriptor, f"{path} is being written by another process. Give each job its own id.")
        try:
            header = layout.parse_header(os.pread(descriptor, layout.PAGE, 0))
            is_ours = (header.pid, header.start_ticks, header.pid_namespace) == ours
            if is_ours and os.fstat(descriptor).st_size == layout.FILE_BYTES:
                return descriptor, mmap.mmap(descriptor, layout.FILE_BYTES), header
        except TelemetryError:
            pass  # of another version or damaged: replaced like any file of a dead process
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _create(path: Path) -> int:
    """Make the file under another name, allocated and locked, then give it its name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    free = os.statvfs(path.parent)
    if free.f_bavail * free.f_frsize < 2 * layout.FILE_BYTES:
        raise TelemetryError(
            f"{path.parent} has {free.f_bavail * free.f_frsize / 2**20:.1f} MiB free, and a rank's "
            f"telemetry takes {layout.FILE_BYTES / 2**20:.1f} MiB. Set BOLTMESH_RUN_DIR to another "
            f"local disk."
        )
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        _allocate(descriptor)
        _lock(descriptor, f"{temporary} cannot be locked. Set BOLTMESH_RUN_DIR to a local disk.")
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


def _allocate(descriptor: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, layout.FILE_BYTES)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
        else:
            return
    os.pwrite(descriptor, bytes(layout.FILE_BYTES), 0)


def _lock(descriptor: int, problem: str) -> None:
    """Lock the file for good. A reader that asks whether it is locked holds it for a moment."""
    for _ in range(_LOCK_ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_PAUSE_S)
    raise TelemetryError(problem)


def _drop_in_child() -> None:
    for writer in list(_writers):
        # The lock may have been held by a thread that the child does not have.
        writer._lock = Lock()  # noqa: SLF001 - the same module
        writer._unwritten.clear()  # noqa: SLF001
        writer._drop()  # noqa: SLF001


os.register_at_fork(after_in_child=_drop_in_child)
