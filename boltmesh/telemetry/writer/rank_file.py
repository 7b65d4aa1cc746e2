"""Writes one rank's telemetry file: no thread, no system call, about a microsecond a record.

A record is packed, sealed and copied into the mapped file; the kernel owns the pages from then
on, so a rank that is killed leaves everything up to its last record.

``open_rank_file`` makes the file, or continues it. Its blocks are allocated then, because a mapped
file on a full disk does not raise: it kills the process.

The file is locked for as long as the writer lives. The kernel releases the lock at death, which
is how a reader knows (``Liveness`` in ``reader/rank_reader.py``). A forked child (a data-loader
worker) drops the mapping at once, so that it neither writes nor keeps the lock alive.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, Final, NamedTuple

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.process import start_ticks
from boltmesh.telemetry import layout
from boltmesh.telemetry.job import open_private, pid_namespace
from boltmesh.telemetry.layout import SECTIONS, Header
from boltmesh.telemetry.rank_ranges import pack_ranks
from boltmesh.telemetry.redaction import redact_text
from boltmesh.telemetry.writer.traffic_records import TrafficRecords

_LOCK_ATTEMPTS: Final = 20
_LOCK_PAUSE_S: Final = 0.005


class OpenFile(NamedTuple):
    """A rank's file, locked and mapped."""

    descriptor: int
    mapping: mmap.mmap
    header: Header
    is_new: bool
    """It was made just now; else this process has written into it before."""


def open_rank_file(
    path: Path,
    ours: tuple[int, int, int],
    *,
    rank: int,
    world_size: int,
    continues_earlier: bool = True,
) -> OpenFile:
    """Continue this process's own file, or make a new one in the place of a dead process's.

    Args:
        path: Where it is.
        ours: Pid, start time and pid namespace of this process, as in the header.
        rank: Global rank.
        world_size: Ranks of the job.
        continues_earlier: As of ``RankFile``.

    Raises:
        TelemetryError: Another process writes it, or there is no room for it.
        OSError: As the system says it.
    """
    if os.path.lexists(path):
        earlier = _open_earlier(path, ours)
        if earlier is not None:
            if continues_earlier:
                return earlier
            earlier.mapping.close()
            os.close(earlier.descriptor)
    descriptor = _create(path)
    try:
        mapping = mmap.mmap(descriptor, layout.FILE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    header = Header(*ours, rank, world_size, *_clocks())
    mapping[: layout.PAGE] = header.pack()
    return OpenFile(descriptor, mapping, header, is_new=True)


def _clocks() -> tuple[float, int]:
    """Return the wall clock and the monotonic clock of one moment.

    A process that had to wait between the two would show all it does that much earlier or later
    than other ranks show theirs. The shortest of several tries is right to its length.
    """
    tries = []
    for _ in range(5):
        before_ns = time.monotonic_ns()
        wall_s = time.time()
        after_ns = time.monotonic_ns()
        tries.append((after_ns - before_ns, wall_s, (before_ns + after_ns) // 2))
    _, wall_s, monotonic_ns = min(tries)
    return wall_s, monotonic_ns


def _open_earlier(path: Path, ours: tuple[int, int, int]) -> OpenFile | None:
    os.close(open_private(path))  # refuses links and files of others before it is opened to write
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _lock(descriptor, f"{path} is being written by another process. Give each job its own id.")
        try:
            header = layout.parse_header(os.pread(descriptor, layout.PAGE, 0))
            is_ours = (header.pid, header.start_ticks, header.pid_namespace) == ours
            if is_ours and os.fstat(descriptor).st_size == layout.FILE_BYTES:
                mapping = mmap.mmap(descriptor, layout.FILE_BYTES)
                return OpenFile(descriptor, mapping, header, is_new=False)
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
    """Lock the file for good. A reader that checks whether it is locked holds it for a moment."""
    for _ in range(_LOCK_ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_PAUSE_S)
    raise TelemetryError(problem)


OTHERS: Final = "(others)"
TOUCH_EVERY_NS: Final = 60_000_000_000

MAX_RUNS: Final = 2048
"""Runs of evenly spaced ranks, in all groups together, so that the names always have room."""

_writers: "weakref.WeakSet[RankFile]" = weakref.WeakSet()


class RankFile(TrafficRecords):
    """The telemetry file of this rank, open for writing.

    Every method but ``close`` may be called from any thread. After ``close``, and in a forked
    child, all of them do nothing.

    Args:
        path: From ``rank_file``. A file of an earlier process is replaced; one that this very
            process wrote (fit, then test, under one job id) is continued.
        rank: Global rank.
        world_size: Ranks of the job.
        continues_earlier: False: what this process wrote is replaced too, for steps of two fits
            are no series.
    """

    def __init__(
        self, path: Path, *, rank: int, world_size: int, continues_earlier: bool = True
    ) -> None:
        self.path = path
        self._pid = os.getpid()
        ours = (self._pid, start_ticks(self._pid) or 0, pid_namespace())
        opened = open_rank_file(
            path, ours, rank=rank, world_size=world_size, continues_earlier=continues_earlier
        )
        super().__init__(opened.mapping)
        self._descriptor = opened.descriptor
        self.header = opened.header
        self.is_new = opened.is_new
        """This process has not written into it before."""
        self._status_sequence = 0
        self._memory_sequence = 0
        self._names_sequence = 0
        self._names: dict[str, Any] = {"groups": [], "operators": [], "metrics": []}
        self._numbers: dict[str, dict[str, int]] = {"operators": {}, "metrics": {}}
        self._groups: dict[str, int] = {}
        self._num_runs = 0
        self._lacks_room = False
        self._series_counts = [0] * layout.MAX_METRICS
        self._series_strides = [1] * layout.MAX_METRICS
        self.offloaded: tuple[int, ...] = (0,) * (3 * len(layout.OFFLOAD_WAYS))
        """The totals that ``offload`` was given last."""
        self._touched_ns = time.monotonic_ns()
        self._restore()
        _writers.add(self)

    @property
    def is_open(self) -> bool:
        """Whether records still go into the file."""
        return self._map is not None

    @property
    def num_steps(self) -> int:
        """Steps that were ever written here."""
        return self.sequences["steps"]

    def close(self) -> None:
        """Unmap the file and release its lock; its content stays."""
        with self.lock:
            self._drop()

    def _drop(self) -> None:
        self.write_counters_locked()
        mapping, self._map = self._map, None
        if mapping is not None:
            mapping.close()
            os.close(self._descriptor)

    # Names

    def write_facts(self, facts: Mapping[str, object]) -> None:
        """Store values that rarely change: coordinates, device, expected traffic."""
        with self.lock:
            self._names.update(facts)
            self._write_names()

    def group_number(self, name: str, axis: str, ranks: Sequence[int] = ()) -> int:
        """Return the number of a process group, whose axis may become known later.

        Args:
            name: The same on all of its members.
            axis: Which of the mesh it is.
            ranks: Its members, by global rank; empty where they are not known.
        """
        with self.lock:
            known = self._names["groups"]
            number = self._groups.get(name)
            if number is None:
                number = min(len(known), layout.MAX_GROUPS - 1)
                self._groups[name] = number
                if len(known) == layout.MAX_GROUPS:
                    if known[-1]["name"] == OTHERS:
                        return number
                    name, axis, ranks = OTHERS, "other", ()
                    known.pop()
                group = {"name": name[: layout.MAX_NAME], "members": self._members(ranks)}
                known.append(group)
            elif known[number]["axis"] == axis or known[number]["name"] == OTHERS:
                return number
            known[number]["axis"] = axis[: layout.MAX_NAME]
            self._write_names()
            return number

    def _members(self, ranks: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the members as runs; empty if there is no room for them."""
        runs = pack_ranks(ranks)
        if self._num_runs + len(runs) > MAX_RUNS:
            return []
        self._num_runs += len(runs)
        return runs

    def group_of(self, number: int) -> tuple[str, str, list[tuple[int, int, int]]]:
        """Return the name, the axis and the members, as runs, of a group."""
        with self.lock:
            group = self._names["groups"][number]
            return group["name"], group["axis"], group["members"]

    def operator_of(self, number: int) -> str:
        """Return the name of an operator."""
        with self.lock:
            name: str = self._names["operators"][number]
            return name

    def operator_number(self, name: str) -> int:
        """Return the number of an operator."""
        with self.lock:
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

    def _metric_number(self, name: str) -> int | None:
        """Return the number of a series; None if there is no room for another one of the user's."""
        known = self._numbers["metrics"]
        if name not in known and not _is_own(name):
            most = layout.MAX_METRICS - layout.OWN_METRICS
            if self._lacks_room or sum(not _is_own(each) for each in known) >= most:
                if not self._lacks_room:
                    self._lacks_room = True
                    self.event(
                        "warning",
                        f"telemetry keeps the first {most} metrics that are logged; '{name}' and "
                        f"later ones are in the logger alone",
                    )
                return None
        return self._number("metrics", name, layout.MAX_METRICS)

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
        with self.lock:
            if self._map is None:
                return
            self._status_sequence += 1
            section = SECTIONS["status"]
            at = layout.slot_offset(section, self._status_sequence)
            self._map[at : at + section.record_bytes] = layout.STATUS.pack(
                self._status_sequence, *fields, self.counted
            )

    def memory(self, bytes_by_kind: Sequence[int]) -> None:
        """Write the memory by kind; the fields are those of ``layout.MEMORY``."""
        with self.lock:
            if self._map is None:
                return
            self._memory_sequence += 1
            section = SECTIONS["memory"]
            at = layout.slot_offset(section, self._memory_sequence)
            self._map[at : at + section.record_bytes] = layout.MEMORY.pack(
                self._memory_sequence, *bytes_by_kind
            )

    def phase(self, index: int) -> None:
        """Write the phase that the rank is in: one byte, which is never torn."""
        if self._map is not None:
            self._map[layout.PHASE_OFFSET] = index

    def newest_step(self, global_step: int) -> None:
        """Write how far the rank is; 0: not known."""
        if self._map is not None:
            at = layout.NEWEST_STEP_OFFSET
            self._map[at : at + layout.NEWEST_STEP.size] = layout.NEWEST_STEP.pack(global_step)

    def step(self, *fields: float) -> int:
        """Append a step; return its sequence number."""
        return self._append("steps", layout.STEP, *fields)

    def span(self, *fields: int) -> int:
        """Append a pipeline chunk."""
        return self._append("spans", layout.SPAN, *fields)

    def offload(self, global_step: int, totals: Sequence[int]) -> None:
        """Append the bytes moved since the start; the totals are those of ``layout.OFFLOAD``."""
        self.offloaded = tuple(totals)
        self._append("offload", layout.OFFLOAD, global_step, *totals)

    def event(self, kind: str, message: str) -> None:
        """Append a line of text, without secrets, cut to the size of its field."""
        text = redact_text(message).encode(errors="replace")[: layout.MAX_MESSAGE]
        number = layout.EVENT_KINDS.index(kind)
        self._append("events", layout.EVENT, time.time(), number, 0, len(text), text)

    def point(self, name: str, global_step: int, value: float) -> None:
        """Add a value to a metric's series: to its rings, and to the thinned whole run."""
        with self.lock:
            number = self._metric_number(name)
            if self._map is None or number is None:
                return
            section = SECTIONS["series"]
            size = section.record_bytes
            base = section.offset + number * layout.POINTS_PER_SERIES * size
            before = self._series_counts[number]
            self._series_counts[number] = before + 1
            sealed = layout.POINT.pack(before + 1, global_step, value)
            self._map[base : base + size] = sealed
            for ring, every in enumerate(layout.SERIES_RINGS):
                if before % every == 0:
                    at = base + layout.series_ring_slot(ring, before) * size
                    self._map[at : at + size] = sealed
            stride = self._series_strides[number]
            if before % stride:
                return
            position = before // stride
            if position == layout.THINNED_POINTS:
                self._halve(base + size, size)
                self._series_strides[number] = layout.series_stride(before + 1)
                if before % self._series_strides[number]:
                    return
                position = before // self._series_strides[number]
            at = base + (1 + position) * size
            self._map[at : at + size] = sealed

    def _halve(self, base: int, size: int) -> None:
        """Keep every second point; later slots are overwritten in time."""
        assert self._map is not None
        for position in range(1, (layout.THINNED_POINTS + 1) // 2):
            source, target = base + 2 * position * size, base + position * size
            self._map[target : target + size] = self._map[source : source + size]

    def _append(self, name: str, record: layout.Record, *fields: object) -> int:
        with self.lock:
            self.sequences[name] += 1
            sequence = self.sequences[name]
            if self._map is not None:
                at = layout.slot_offset(SECTIONS[name], sequence)
                self._map[at : at + record.size] = record.pack(sequence, *fields)
            return sequence

    def touch(self) -> None:
        """Renew the file's time once a minute, for writing through a mapping does not.

        Cleaners of temporary folders remove files that have not changed for days.
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
        self._num_runs = sum(len(each["members"]) for each in self._names["groups"])
        for kind in self._numbers:
            self._numbers[kind] = {name: at for at, name in enumerate(self._names[kind])}
        for name, record in (
            ("steps", layout.STEP),
            ("traffic", layout.TRAFFIC),
            ("spans", layout.SPAN),
            ("events", layout.EVENT),
            ("offload", layout.OFFLOAD),
        ):
            self.sequences[name] = layout.newest_sequence(content, SECTIONS[name], record)
        self._status_sequence = layout.newest_sequence(content, SECTIONS["status"], layout.STATUS)
        self._memory_sequence = layout.newest_sequence(content, SECTIONS["memory"], layout.MEMORY)
        self._names_sequence = max(
            layout.sequence_at(content, layout.slot_offset(SECTIONS["names"], slot))
            for slot in (1, 2)
        )
        self.restore_traffic(content)
        if newest := self.sequences["offload"]:
            at = layout.slot_offset(SECTIONS["offload"], newest)
            self.offloaded = (layout.OFFLOAD.unpack(content, at) or (0, 0, *self.offloaded))[2:]
        series = SECTIONS["series"]
        for number in range(len(self._names["metrics"])):
            at = series.offset + number * layout.POINTS_PER_SERIES * series.record_bytes
            if point := layout.POINT.unpack(content, at):
                self._series_counts[number] = point[0]
                self._series_strides[number] = layout.series_stride(point[0])


def _is_own(name: str) -> bool:
    return name in {"loss", "lr"} or name.startswith("boltmesh/")


def _drop_in_child() -> None:
    for writer in list(_writers):
        # The lock may have been held by a thread that the child does not have.
        writer.lock = RLock()
        writer._unwritten.clear()  # noqa: SLF001 - the same module
        writer._unwritten_peers.clear()  # noqa: SLF001
        writer._drop()  # noqa: SLF001


os.register_at_fork(after_in_child=_drop_in_child)
