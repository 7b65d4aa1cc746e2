"""What a step moves, beside what the strategy says that it should move."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from boltmesh.telemetry.snapshot import CollectiveTotal, JobSnapshot
from boltmesh.telemetry.traffic import ExpectedTraffic

Verdict = Literal["equal", "differs", "missing", "unstated", "pending"]
"""``missing``: expected, but never seen. ``unstated``: seen, and the strategy says nothing about
it. ``pending``: too few steps to tell."""

TOLERANCE = 0.005
"""Counting is exact, but a mean over steps may hold a part of another one, such as a validation."""

STEPS_BEFORE_A_VERDICT = 3
"""The first steps of DDP also move what it needs to arrange its buckets."""


class TrafficRow(msgspec.Struct, frozen=True):
    """One operator on one axis, the mean over the ranks that count it, for one optimizer step."""

    axis: str
    operator: str
    calls: float | None
    payload_bytes: float | None
    wire_bytes_per_second: float | None
    """Bytes on the wire while the operator runs; None where its end is not known."""
    expected_bytes: float | None
    why: str | None
    """The formula behind ``expected_bytes``."""
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        """Measured over expected."""
        if not self.expected_bytes or self.payload_bytes is None:
            return None
        return self.payload_bytes / self.expected_bytes


def traffic_rows(job: JobSnapshot) -> list[TrafficRow]:
    """Return what is measured or expected: the mesh's axes outermost first, then the most bytes.

    Operators that ran only outside of steps, to set up or to save, are no part of a step.
    """
    measured: dict[tuple[str, str], list[CollectiveTotal]] = defaultdict(list)
    for rank in job.ranks:
        for total in _by_operator(rank.collectives):
            measured[total.axis, total.operator].append(total)
    expected = {(item.axis, item.operator): item for item in job.expected}
    is_early = job.global_step < STEPS_BEFORE_A_VERDICT or job.communication_note is not None
    rows = [
        _row(key, measured.get(key, ()), expected.get(key), job, is_early=is_early)
        for key in {**expected, **measured}
    ]
    rows = [row for row in rows if row.calls != 0 or row.expected_bytes]
    axes = [*job.mesh, "world"]
    return sorted(
        rows,
        key=lambda row: (
            axes.index(row.axis) if row.axis in axes else len(axes),
            -max(row.payload_bytes or 0, row.expected_bytes or 0),
            row.operator,
        ),
    )


def _by_operator(collectives: Iterable[CollectiveTotal]) -> Iterable[CollectiveTotal]:
    """Add up what one rank counted for one operator in several groups of an axis."""
    found: dict[tuple[str, str], CollectiveTotal] = {}
    for total in collectives:
        key = (total.axis, total.operator)
        other = found.get(key)
        found[key] = total if other is None else _add(other, total)
    return found.values()


def _add(left: CollectiveTotal, right: CollectiveTotal) -> CollectiveTotal:
    return msgspec.structs.replace(
        left,
        calls=left.calls + right.calls,
        payload_bytes=left.payload_bytes + right.payload_bytes,
        calls_per_step=_sum(left.calls_per_step, right.calls_per_step),
        bytes_per_step=_sum(left.bytes_per_step, right.bytes_per_step),
        seconds_per_step=_sum(left.seconds_per_step, right.seconds_per_step),
    )


def _sum(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left + right


def _row(
    key: tuple[str, str],
    totals: Sequence[CollectiveTotal],
    expected: ExpectedTraffic | None,
    job: JobSnapshot,
    *,
    is_early: bool,
) -> TrafficRow:
    axis, operator = key
    payload = _mean(total.bytes_per_step for total in totals)
    seconds = _mean(total.seconds_per_step for total in totals)
    speed = None
    if payload and seconds:
        speed = payload * wire_factor(operator, axis_size(job, axis)) / seconds
    return TrafficRow(
        axis=axis,
        operator=operator,
        calls=_mean(total.calls_per_step for total in totals),
        payload_bytes=payload,
        wire_bytes_per_second=speed,
        expected_bytes=None if expected is None else expected.payload_bytes,
        why=None if expected is None else expected.why,
        verdict=_verdict(payload, expected, is_seen=bool(totals), is_early=is_early),
    )


def _verdict(
    payload: float | None, expected: ExpectedTraffic | None, *, is_seen: bool, is_early: bool
) -> Verdict:
    if expected is None:
        return "unstated"
    if is_early or (is_seen and payload is None):
        return "pending"
    if not is_seen:
        return "missing" if expected.payload_bytes else "equal"
    difference = abs((payload or 0) - expected.payload_bytes)
    return "equal" if difference <= TOLERANCE * expected.payload_bytes else "differs"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def axis_size(job: JobSnapshot, axis: str) -> int:
    """Return how many ranks a group of ``axis`` has; the world where the mesh does not know it."""
    return job.mesh.get(axis, job.world_size)


def wire_factor(operator: str, size: int) -> float:
    """Return the bytes that a ring algorithm sends per rank, over the operator's payload."""
    if size <= 1:
        return 0.0
    name = operator.lstrip("_")
    if name.startswith("allreduce"):
        return 2 * (size - 1) / size
    if name.startswith(("allgather", "reduce_scatter", "alltoall")):
        return (size - 1) / size
    return 1.0
