"""The format of one rank's telemetry file, version 5: little-endian, fixed offsets.

Everything here is ``struct`` and ``zlib``, so that a reader needs nothing but the standard
library. A file is a header page and twelve sections:

======== ============================================================================
header   who wrote the file, its clocks, where each section lies, the present phase and step
status   step, epoch, memory and state of the rank, in two slots
memory   bytes by kind and place, in two slots
groups   the newest collective of each group, for when ``traffic`` has forgotten it
peers    calls and payload bytes of each point-to-point operator to or from each peer
names    a JSON object, in two buffers: names behind the numbers, and what is constant
counters calls and payload bytes of each operator on each group, since the start
steps    ring: one record a batch, with its phases
series   the loss and the logged metrics: the whole run thinned, the newest values finer
traffic  ring: one record a collective
spans    ring: one record a pipeline chunk, a microbatch in a stage
events   ring: lines for a human
offload  ring: what went to and came from host and disk, one record an optimizer step
======== ============================================================================

[Note: Records without fences]
Writer and reader share pages and nothing else, and Python has no memory fences: on ARM64 a
reader may see the second half of a record before its first. So no reader trusts an index or a
sequence number alone. Each record is its sequence number, its fields and a CRC32 of both; what
does not match is being written, was torn by a crash, or is damaged, and counts as absent. Where
one record only exists (names, status, memory) there are two slots, written in turn, so that one
of them is whole whenever the writer dies.
"""

import math
import struct
import zlib
from typing import Any, Final, NamedTuple

from boltmesh.errors import TelemetryError

MAGIC: Final = b"BOLTMESH"
VERSION: Final = 5
PAGE: Final = 4096

MAX_GROUPS: Final = 64
MAX_OPERATORS: Final = 32
"""Names beyond these share the last number, which is then called ``(others)``."""
MAX_METRICS: Final = 48
OWN_METRICS: Final = 16
"""Kept of them for the loss, the learning rate and the recorder's own series."""

MAX_PEERS: Final = 1024
"""Operators to or from a peer in a group that are counted; later ones are in no table."""

MAX_NAME: Final = 96
MAX_MESSAGE: Final = 480
NAMES_BYTES: Final = 64 * 1024

UNKNOWN: Final = -1
"""Stands for None in the integer fields that can be unknown."""

STATES: Final = ("starting", "running", "finished", "failed")
EVENT_KINDS: Final = ("start", "checkpoint", "validation", "warning", "error", "end")
OFFLOAD_WAYS: Final = (("host", "read"), ("host", "write"), ("disk", "read"), ("disk", "write"))
"""Places beside the device, and directions as the place sees them: a read brings to the device."""

CHUNK_KINDS: Final = ("F", "B", "I", "W")
"""Forward; whole backward; backward for the input only; backward for the weights only."""


class Record:
    """One kind of record: a sequence number, fields, and a CRC32 over both.

    Args:
        fields: The ``struct`` codes between the sequence number and the checksum.
    """

    def __init__(self, fields: str) -> None:
        self._pack = struct.Struct("<Q" + fields).pack
        self._sealed = struct.Struct("<Q" + fields + "I")
        self.body_bytes: Final = self._sealed.size - 4
        self.size: Final = self._sealed.size

    def pack(self, sequence: int, *fields: object) -> bytes:
        """Return the sealed record."""
        body = self._pack(sequence, *fields)
        return body + zlib.crc32(body).to_bytes(4, "little")

    def unpack(self, buffer: bytes, offset: int) -> tuple[Any, ...] | None:
        """Return the sequence number and the fields, or None when the record is not whole."""
        end = offset + self.body_bytes
        if len(buffer) < end + 4:
            return None
        values = self._sealed.unpack_from(buffer, offset)
        if values[0] == 0 or values[-1] != zlib.crc32(buffer[offset:end]):
            return None
        return values[:-1]


_CRC: Final = struct.Struct("<I")
_SEQUENCE: Final = struct.Struct("<Q")

PHASE_OFFSET: Final = 2048
"""Where, in the header page, one byte holds the phase that the rank is in. It changes many times
a step, and one byte is never torn."""

NEWEST_STEP_OFFSET: Final = PHASE_OFFSET + 8
NEWEST_STEP: Final = Record("")
"""The global step, in the place of the sequence number, as soon as a batch has ended: ``status`` is
a tenth of a second behind, and who is killed has no time for it."""

STATUS: Final = Record("BBHiqqdqqqqQ")
"""state, 0, 0, epoch, global step, batch index, seconds on the wall clock, host resident bytes,
device bytes allocated, reserved and at the peak, and the sequence number of the record in
``traffic`` up to which ``counters``, ``groups`` and ``peers`` were written."""

MEMORY: Final = Record("24q")
"""Bytes measured of each of MEMORY_KINDS on the device, on the host and on disk."""

GROUP: Final = Record("QHHIQQ")
"""Newest collective of a group: its sequence within the group (in the place of the sequence
number), that of its record in ``traffic``, operator, flags, 0, nanoseconds on the monotonic clock
at the enqueue and at the completion. Behind ``traffic`` like COUNTER."""

PEER: Final = Record("HHIQQ")
"""calls, in the place of the sequence number, group, operator, peer's global rank, sequence number
of the record in ``traffic`` up to which this counts, and payload bytes."""

COUNTER: Final = Record("Q")
"""calls, in the place of the sequence number, and payload bytes. Behind ``traffic`` by a tenth of a
second or more; the totals of what it lacks are in the records there."""

STEP: Final = Record("qqiIdQ9Qdqq")
"""batch index, global step, epoch, flags (1: the loss is known), seconds on the wall clock at the
end, nanoseconds in all, nanoseconds of each of the nine phases, loss, samples, tokens."""

POINT: Final = Record("qd")
"""global step and value."""

TRAFFIC: Final = Record("qHHBBHQQQQQQ")
"""step that it belongs to (the sequence number of its record in ``steps``), group, operator,
phase, flags, peer, sequence within the group, payload bytes, calls and payload bytes of the
operator on the group up to and with this one, nanoseconds on the monotonic clock at the enqueue and
at the completion (0: not complete, or not known). The peer is its global rank plus one; 0
for a collective; UNKNOWN_PEER of a receive from any source until it is waited for."""

UNKNOWN_PEER: Final = 0xFFFF

SPAN: Final = Record("qHHBBHQQ")
"""optimizer step, stage, microbatch, kind, 0, 0, nanoseconds on the monotonic clock at start and at
end."""

EVENT: Final = Record(f"dBBH{MAX_MESSAGE}s")
"""seconds on the wall clock, kind, 0, bytes of the message, the message in UTF-8."""

OFFLOAD: Final = Record("q12Q")
"""global step, and of each of OFFLOAD_WAYS since the start of the run: transfers, bytes, and
nanoseconds in which at least one of them was under way."""

STEP_HAS_LOSS: Final = 1
TRAFFIC_IS_SYNCHRONOUS: Final = 1
"""The caller asked to wait for it."""
TRAFFIC_IS_TIMED: Final = 2
"""The completion will be recorded."""


class Section(NamedTuple):
    """Where one kind of record lies."""

    name: str
    offset: int
    record_bytes: int
    capacity: int

    @property
    def end(self) -> int:
        """Offset of its end."""
        return self.offset + self.record_bytes * self.capacity


TREND: Final = "boltmesh/trend/"
"""Begins the names of series that the recorder itself adds: seconds of a step, tokens a second,
bytes of memory, bytes a second, the load of its device, the wall clock. They are no metrics of the
user's."""

THINNED_POINTS: Final = 511
"""Slots of a series for values of the whole run, see ``series_stride``."""
SERIES_RINGS: Final = (1, 16)
"""Each series has these rings beside: of its newest values, and of every 16th one."""
RING_POINTS: Final = 256
"""Slots of each of them."""
POINTS_PER_SERIES: Final = 1 + THINNED_POINTS + len(SERIES_RINGS) * RING_POINTS
"""The first slot is for the newest value."""

_SIZES: Final = (
    ("status", STATUS.size, 2),
    ("memory", MEMORY.size, 2),
    ("groups", GROUP.size, MAX_GROUPS),
    ("peers", PEER.size, MAX_PEERS),
    ("names", NAMES_BYTES, 2),
    ("counters", COUNTER.size, MAX_GROUPS * MAX_OPERATORS),
    ("steps", STEP.size, 1024),
    ("series", POINT.size, MAX_METRICS * POINTS_PER_SERIES),
    ("traffic", TRAFFIC.size, 8192),
    ("spans", SPAN.size, 4096),
    ("events", EVENT.size, 256),
    ("offload", OFFLOAD.size, 256),
)


def _lay_out() -> dict[str, Section]:
    sections: dict[str, Section] = {}
    offset = PAGE
    for name, record_bytes, capacity in _SIZES:
        section = Section(name, offset, record_bytes, capacity)
        sections[name] = section
        offset = -(-section.end // PAGE) * PAGE
    return sections


SECTIONS: Final = _lay_out()
FILE_BYTES: Final = -(-SECTIONS["offload"].end // PAGE) * PAGE
"""About 2.7 MB."""

_HEADER: Final = struct.Struct("<8sII Q Q Q I I d Q I I")
_ENTRY: Final = struct.Struct("<16sQII")


class Header(NamedTuple):
    """The writer of a file."""

    pid: int
    start_ticks: int
    """Field 22 of ``/proc/PID/stat``; with the pid it names a process for good. 0: no procfs."""
    pid_namespace: int
    """Inode of ``/proc/self/ns/pid``; pids of another namespace cannot be looked up."""
    rank: int
    world_size: int
    wall_s: float
    """``time.time()`` and ``time.monotonic_ns()`` at one moment, to turn one into the other."""
    monotonic_ns: int

    def wall_time(self, monotonic_ns: int) -> float:
        """Return the wall clock, in seconds, at a moment of the monotonic clock."""
        return self.wall_s + (monotonic_ns - self.monotonic_ns) / 1e9

    def pack(self) -> bytes:
        """Return the header page, the section table included."""
        table = b"".join(
            _ENTRY.pack(each.name.encode(), each.offset, each.record_bytes, each.capacity)
            for each in SECTIONS.values()
        )
        head = _HEADER.pack(
            MAGIC,
            VERSION,
            FILE_BYTES,
            self.pid,
            self.start_ticks,
            self.pid_namespace,
            self.rank,
            self.world_size,
            self.wall_s,
            self.monotonic_ns,
            len(SECTIONS),
            zlib.crc32(table),
        )
        page = head + _CRC.pack(zlib.crc32(head)) + table
        return page.ljust(PAGE, b"\0")


def parse_header(page: bytes) -> Header:
    """Read a header page; raise TelemetryError saying what is wrong with it."""
    if len(page) < PAGE:
        raise TelemetryError(f"the file has {len(page)} bytes and no whole header ({PAGE} bytes)")
    magic, version, file_bytes, *fields = _HEADER.unpack_from(page)
    if magic != MAGIC:
        raise TelemetryError("it is not a telemetry file of boltmesh")
    if version != VERSION:
        raise TelemetryError(
            f"it has format version {version}, and this boltmesh reads version {VERSION}. "
            f"Read it with the boltmesh that the job runs"
        )
    pid, ticks, namespace, rank, world_size, wall_s, monotonic_ns, entries, table_crc = fields
    head = page[: _HEADER.size]
    table = page[_HEADER.size + 4 : _HEADER.size + 4 + entries * _ENTRY.size]
    (head_crc,) = _CRC.unpack_from(page, _HEADER.size)
    if zlib.crc32(head) != head_crc or zlib.crc32(table) != table_crc:
        raise TelemetryError("its header is damaged")
    if entries != len(SECTIONS) or not math.isfinite(wall_s):
        raise TelemetryError(f"its header is not one of format version {VERSION}")
    found = {
        name.rstrip(b"\0").decode("ascii", "replace"): Section(
            name.rstrip(b"\0").decode("ascii", "replace"), offset, size, capacity
        )
        for name, offset, size, capacity in _ENTRY.iter_unpack(table)
    }
    if found != SECTIONS or file_bytes != FILE_BYTES:
        raise TelemetryError(f"its sections are not those of format version {VERSION}")
    return Header(pid, ticks, namespace, rank, world_size, wall_s, monotonic_ns)


def slot_offset(section: Section, sequence: int) -> int:
    """Return where a ring keeps the record with this sequence number, which starts at 1."""
    return section.offset + (sequence - 1) % section.capacity * section.record_bytes


def sequence_at(buffer: bytes, offset: int) -> int:
    """Return the sequence number that a record claims, unchecked."""
    value: int = _SEQUENCE.unpack_from(buffer, offset)[0]
    return value


def newest_sequence(buffer: bytes, section: Section, record: Record) -> int:
    """Return the highest sequence number of a whole record in a ring; 0 if there is none."""
    claims = sorted(
        (
            (sequence_at(buffer, section.offset + slot * section.record_bytes), slot)
            for slot in range(section.capacity)
        ),
        reverse=True,
    )
    for sequence, slot in claims:
        if sequence == 0:
            break
        offset = section.offset + slot * section.record_bytes
        if slot_offset(section, sequence) == offset and record.unpack(buffer, offset):
            return sequence
    return 0


def pack_names(sequence: int, text: bytes) -> bytes:
    """Seal the JSON object of the names section."""
    head = struct.pack("<QI", sequence, len(text)) + text
    sealed = head + _CRC.pack(zlib.crc32(head))
    if len(sealed) > NAMES_BYTES:
        raise TelemetryError(
            f"the names of groups, metrics and expected traffic take {len(sealed)} bytes, and "
            f"{NAMES_BYTES} fit"
        )
    return sealed


def unpack_names(buffer: bytes) -> bytes | None:
    """Return the newest whole JSON text of the names section of a file."""
    section = SECTIONS["names"]
    found = newest_names(buffer[section.offset : section.end])
    return found[1] if found else None


def newest_names(content: bytes) -> tuple[int, bytes] | None:
    """Return the sequence number and the text of the newest whole slot of a names section."""
    newest: tuple[int, bytes] | None = None
    for at in range(0, len(content) - NAMES_BYTES + 1, NAMES_BYTES):
        sequence, length = struct.unpack_from("<QI", content, at)
        end = at + 12 + length
        if sequence == 0 or end + 4 > at + NAMES_BYTES:
            continue
        if zlib.crc32(content[at:end]) != _CRC.unpack_from(content, end)[0]:
            continue
        if newest is None or sequence > newest[0]:
            newest = (sequence, content[at + 12 : end])
    return newest


def series_stride(count: int) -> int:
    """Return of how many values a thinned series keeps one, once ``count`` values have come.

    A thinned series has a fixed number of slots. While they last every value is kept; when they
    are full every second one goes and from then on every second value is kept, and so on: the
    series always spans the whole run, evenly. The stride follows from the count alone, so a writer
    that opens the file again goes on where it was.
    """
    stride = 1
    while (count - 1) // stride >= THINNED_POINTS:
        stride *= 2
    return stride


def series_ring_slot(ring: int, number: int) -> int:
    """Return which slot of a series a ring of it gives a value.

    Args:
        ring: Place in SERIES_RINGS.
        number: How many values came before this one; a multiple of the ring's stride.
    """
    place = number // SERIES_RINGS[ring] % RING_POINTS
    return 1 + THINNED_POINTS + ring * RING_POINTS + place
