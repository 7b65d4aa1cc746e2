"""The records of a rank's file as a reader keeps them, and which of them it does not believe.

A checksum says that a record is as it was written, not that it makes sense: a file may be made to
mislead its reader. Numbers that no run has are refused here, so that whatever is computed from
the others stays within what a snapshot can hold.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from boltmesh.telemetry import layout
from boltmesh.telemetry.snapshot import PHASES, PhaseTime, StepRecord
from boltmesh.telemetry.writer.phases import CHECKPOINT, VALIDATION

MAX_NUMBER: Final = 1 << 60
"""Bytes, calls and nanoseconds beyond this are no measurement."""

MAX_TIME_S: Final = 1e11
"""Seconds since 1970 beyond this are no wall clock."""

_NO_TIME: Final = tuple(PhaseTime(name, 0.0) for name in PHASES)


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
    counted: int
    """The record of ``traffic`` up to which the tables are written."""


class StepRow(NamedTuple):
    """A record of the ring ``steps``."""

    sequence: int
    busy_ns: int
    """Time of the batch without that in validation and checkpoints."""
    is_ordinary: bool
    """Whether neither was in it."""
    record: StepRecord


class Traffic(NamedTuple):
    """A record of the ring ``traffic``."""

    sequence: int
    step: int
    group: int
    operator: int
    phase: int
    flags: int
    peer: int
    in_group: int
    payload_bytes: int
    total_calls: int
    total_bytes: int
    enqueued_ns: int
    done_ns: int


class Span(NamedTuple):
    """A record of the ring ``spans``."""

    step: int
    stage: int
    microbatch: int
    kind: str
    start_ns: int
    end_ns: int


class OffloadRow(NamedTuple):
    """A record of the ring ``offload``."""

    global_step: int
    ways: tuple[tuple[int, int, int], ...]
    """Transfers, bytes and busy nanoseconds of each of ``layout.OFFLOAD_WAYS``."""


class Line(NamedTuple):
    """A record of the ring ``events``."""

    wall_s: float
    kind: str
    message: str


def make_status(fields: tuple[Any, ...]) -> Status | None:
    """Return a status from the fields of its record."""
    _, state, _, _, *rest = fields
    if state >= len(layout.STATES) or not is_time(rest[3]):
        return None
    if rest[0] < 0 or not _are_counts(rest[1:3] + rest[4:]):
        return None
    return Status(layout.STATES[state], *rest)


def make_step(fields: tuple[Any, ...]) -> StepRow | None:
    """Return a step from the fields of its record."""
    head, phases, (loss, samples, tokens) = fields[:7], fields[7:16], fields[16:]
    sequence, index, global_step, epoch, flags, wall_s, total_ns = head
    if max(sequence, index, global_step, total_ns, *phases, samples, tokens) > MAX_NUMBER:
        return None
    if min(index, global_step, epoch) < 0 or not is_time(wall_s):
        return None
    record = StepRecord(
        index=index,
        global_step=global_step,
        epoch=epoch,
        end_time=wall_s,
        seconds=total_ns / 1e9,
        phases=tuple(
            # Most phases of most steps are empty, and a viewer holds very many steps.
            PhaseTime(zero.name, nanoseconds / 1e9) if nanoseconds else zero
            for zero, nanoseconds in zip(_NO_TIME, phases, strict=True)
        ),
        loss=loss if flags & layout.STEP_HAS_LOSS else None,
        samples=None if samples < 0 else samples,
        tokens=None if tokens < 0 else tokens,
    )
    interrupted_ns = phases[VALIDATION] + phases[CHECKPOINT]
    return StepRow(sequence, total_ns - interrupted_ns, not interrupted_ns, record)


def make_traffic(fields: tuple[Any, ...]) -> Traffic | None:
    """Return a collective from the fields of its record."""
    *_, enqueued_ns, done_ns = fields
    if max(fields) > MAX_NUMBER or fields[1] < 0 or 0 < done_ns < enqueued_ns:
        return None
    return Traffic._make(fields)


def make_span(fields: tuple[Any, ...]) -> Span | None:
    """Return a chunk from the fields of its record."""
    _, step, stage, microbatch, kind, _, _, start_ns, end_ns = fields
    if kind >= len(layout.CHUNK_KINDS) or not 0 <= step <= MAX_NUMBER:
        return None
    if not start_ns <= end_ns <= MAX_NUMBER:
        return None
    return Span(step, stage, microbatch, layout.CHUNK_KINDS[kind], start_ns, end_ns)


def make_moved(fields: tuple[Any, ...]) -> OffloadRow | None:
    """Return the offload totals up to a step from the fields of its record."""
    _, step, *totals = fields
    if not 0 <= step <= MAX_NUMBER or max(totals) > MAX_NUMBER:
        return None
    return OffloadRow(step, tuple(zip(totals[::3], totals[1::3], totals[2::3], strict=True)))


def make_line(fields: tuple[Any, ...]) -> Line | None:
    """Return an event from the fields of its record; one of an unknown kind as a warning."""
    _, wall_s, kind, _, length, text = fields
    if not is_time(wall_s):
        return None
    name = layout.EVENT_KINDS[kind] if kind < len(layout.EVENT_KINDS) else "warning"
    return Line(wall_s, name, text[:length].decode("utf-8", "replace"))


def is_final(record: Traffic) -> bool:
    """Tell whether a collective is as it will stay."""
    is_done = record.done_ns > 0 or not record.flags & layout.TRAFFIC_IS_TIMED
    return is_done and record.peer != layout.UNKNOWN_PEER


def _are_counts(numbers: Sequence[int]) -> bool:
    """Tell whether all are numbers that can be counted, or not known."""
    return max(numbers) <= MAX_NUMBER and min(numbers) >= layout.UNKNOWN


def is_time(wall_s: float) -> bool:
    """Tell whether it is a time since the epoch, in seconds, that can be shown."""
    return math.isfinite(wall_s) and 0 <= wall_s <= MAX_TIME_S
