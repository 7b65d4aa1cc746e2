"""Traffic of a step: payload, bytes on the wire, and the verdict against the expected bytes.

The payload of a gather-type operator is its full side. The factors from payload to wire are those
of the ring algorithms, which move the least that is possible; a tree moves no less.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from boltmesh.axes import AXES
from boltmesh.telemetry.snapshot import CollectiveTotal, JobSnapshot, RankSnapshot
from boltmesh.telemetry.stall import RECENT_STEPS
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.step_time import batches_per_step, optimizer_step_seconds
from boltmesh.tui.units import mean

POINT_TO_POINT = ("send", "recv")


def is_point_to_point(operator: str) -> bool:
    """Say whether an operator has one rank on the other side, not a whole group."""
    return operator.startswith(POINT_TO_POINT)


def axis_size(job: JobSnapshot, axis: str) -> int | None:
    """Return how many ranks an axis has, or else its largest group, as that of experts.

    None where neither is known.
    """
    if axis == "world":
        return job.world_size
    size = job.mesh.get(axis)
    if size is not None and size > 1:
        return size
    known = (size for (other, _), size in group_sizes(job).items() if other == axis)
    return max(known, default=size)


@remember_last
def group_sizes(job: JobSnapshot) -> Mapping[tuple[str, str], int]:
    """Return how many ranks each process group has, by axis and name."""
    return {
        (group.axis, group.group): len(group.ranks)
        for rank in job.ranks
        for group in rank.groups
        if group.ranks
    }


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


Verdict = Literal["equal", "differs", "missing", "unstated", "pending", "varies"]
"""``missing``: expected, but never seen. ``unstated``: seen, and the strategy says nothing about
it. ``pending``: too few steps to tell. ``varies``: the model decides how much each batch moves, or
batches of other sizes than the expected one move other activations."""

OF_ACTIVATIONS = frozenset(AXES) - {"data"}
"""Axes whose bytes follow the size of a batch."""

TOLERANCE = 0.005
"""Counting is exact, but a mean over steps may hold a part of another one, such as a validation."""

STEPS_BEFORE_A_VERDICT = 3
"""The first steps of DDP also move the messages by which it arranges its buckets."""


def judge(
    payload: float | None, expected: ExpectedTraffic | None, job: JobSnapshot, *, is_seen: bool
) -> Verdict:
    """Compare the bytes of a step with the expectation, if there is one."""
    if expected is None:
        return "unstated"
    is_early = job.global_step < STEPS_BEFORE_A_VERDICT or job.communication_note is not None
    if is_early or (is_seen and payload is None):
        return "pending"
    if not is_seen:
        return "missing" if expected.payload_bytes else "equal"
    if expected.is_mean:
        return "varies"
    difference = abs((payload or 0) - expected.payload_bytes)
    if difference <= TOLERANCE * expected.payload_bytes:
        return "equal"
    is_of_batches = expected.axis in OF_ACTIVATIONS and has_batches_of_several_sizes(job)
    return "varies" if is_of_batches else "differs"


@remember_last
def has_batches_of_several_sizes(job: JobSnapshot) -> bool:
    """Say whether recent batches differ, as the last of an epoch or those of padded texts do."""
    steps = next((rank.steps for rank in job.ranks if rank.steps), ())
    recent = steps[-(RECENT_STEPS + 1) * batches_per_step(job) :]
    return len({(step.samples, step.tokens) for step in recent}) > 1


def explain(
    verdict: Verdict,
    payload: float | None,
    expected: ExpectedTraffic | None,
    calls: float | None,
    job: JobSnapshot,
) -> str | None:
    """Name the most likely cause of a verdict; None if there is nothing to explain."""
    if verdict == "unstated":
        return "the strategy states nothing about it: the model, a metric or Lightning calls it"
    if verdict == "missing":
        return "no rank that is seen has called it"
    if verdict != "differs" or expected is None or payload is None:
        return None
    if not expected.payload_bytes:
        return "the strategy expects none of it"
    ratio = payload / expected.payload_bytes
    batches = batches_per_step(job)
    if batches > 1 and _is_near(ratio, batches):
        return f"once for each of the {batches} batches of a step: no_sync is missing"
    if 1.5 <= ratio < math.inf and _is_near(ratio, round(ratio)):
        return f"all of it is moved {round(ratio)} times a step"
    if _is_near(ratio, 0.5):
        return "half of the bytes: sent in 16 bits where 32 were expected?"
    if expected.calls and calls and not _is_near(calls, expected.calls):
        return f"{calls:,.3g} calls a step, and {expected.calls:,.3g} were expected"
    return "more than the strategy states" if ratio > 1 else "less than the strategy states"


def _is_near(value: float, target: float) -> bool:
    return abs(value - target) <= TOLERANCE * target


class TrafficRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operator on one axis in one optimizer step, the mean over the ranks that count it."""

    axis: str
    operator: str
    num_groups: int
    """Process groups of the axis in which steps have it."""
    num_ranks: int
    """Ranks that count it."""
    calls: float | None
    payload_bytes: float | None
    least: tuple[int, float] | None
    """The rank that moves the fewest bytes, and how many; of equal ones the first."""
    most: tuple[int, float] | None
    seconds: float | None
    """Time from enqueue to completion, summed over the calls; None if an end is unknown."""
    wire_bytes_per_second: float | None
    """Bytes on the wire while the operator runs; None where its end is not known."""
    byte_share: float | None
    """Share of the payload of all ranks."""
    time_share: float | None
    """Share of the step; more than 1 if calls run beside each other."""
    expected_bytes: float | None
    why: str | None
    """The formula behind ``expected_bytes``."""
    verdict: Verdict
    reason: str | None
    """The most likely cause of a difference."""

    @property
    def ratio(self) -> float | None:
        """Measured over expected."""
        if not self.expected_bytes or self.payload_bytes is None:
            return None
        return self.payload_bytes / self.expected_bytes

    @property
    def is_wrong(self) -> bool:
        """Whether the strategy says otherwise."""
        return self.verdict in {"differs", "missing"}

    @property
    def has_uneven_ranks(self) -> bool:
        """Whether ranks move different amounts."""
        if self.least is None or self.most is None:
            return False
        return self.most[1] - self.least[1] > TOLERANCE * self.most[1]


class AxisTotal(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on one axis in one optimizer step, on a mean rank."""

    axis: str
    calls: float | None
    payload_bytes: float | None
    seconds: float | None
    byte_share: float | None
    time_share: float | None


class _RankTotals:
    """Counts of one operator on one axis: in each list an entry per rank."""

    __slots__ = ("bytes", "calls", "groups", "ranks", "seconds")

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.calls: list[float | None] = []
        self.bytes: list[float | None] = []
        self.seconds: list[float | None] = []
        self.groups: set[str] = set()

    def add(self, rank: int, total: CollectiveTotal) -> None:
        # A group for setting up or saving takes no time of a step, which is not recorded for it.
        is_idle = total.calls_per_step == 0
        seconds = 0.0 if is_idle else total.seconds_per_step
        if not is_idle:
            self.groups.add(total.group)
        if self.ranks and self.ranks[-1] == rank:  # in another group of the same axis
            self.calls[-1] = _sum(self.calls[-1], total.calls_per_step)
            self.bytes[-1] = _sum(self.bytes[-1], total.bytes_per_step)
            self.seconds[-1] = _sum(self.seconds[-1], seconds)
            return
        self.ranks.append(rank)
        self.calls.append(total.calls_per_step)
        self.bytes.append(total.bytes_per_step)
        self.seconds.append(seconds)


@remember_last
def traffic_rows(job: JobSnapshot) -> list[TrafficRow]:
    """Return measured and expected traffic: the mesh's axes outermost first, then the most bytes.

    Operators that ran only outside of steps, to set up or to save, are no part of a step.
    """
    measured = _operator_columns(job.ranks)
    expected = {(item.axis, item.operator): item for item in job.expected}
    all_bytes = sum(size for column in measured.values() for size in column.bytes if size)
    step_s = optimizer_step_seconds(job)
    rows = [
        _row(key, measured.get(key), expected.get(key), job, all_bytes=all_bytes, step_s=step_s)
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


def axis_totals(rows: Sequence[TrafficRow], *, num_ranks: int) -> list[AxisTotal]:
    """Return the sums of the axes that have several operators, and of all axes, if there are more.

    A row is the mean of the ranks that count it, which need not be all; the sum is that of a mean
    rank of the job. What is not known of one operator is not known of the axis.

    Args:
        rows: Rows of the job.
        num_ranks: Number of ranks whose traffic is known: those of other hosts are not counted.
    """
    counted = [row for row in rows if row.num_ranks]
    axes = list(dict.fromkeys(row.axis for row in counted))
    totals = [
        _axis_total(axis, members, num_ranks)
        for axis in axes
        if len(members := [row for row in counted if row.axis == axis]) > 1
    ]
    if len(axes) > 1:
        totals.append(_axis_total("all axes", counted, num_ranks))
    return totals


def _axis_total(axis: str, rows: Sequence[TrafficRow], num_ranks: int) -> AxisTotal:
    def total(values: Iterable[float | None]) -> float | None:
        shares = [row.num_ranks / max(num_ranks, row.num_ranks) for row in rows]
        return _total(zip(values, shares, strict=True))

    return AxisTotal(
        axis=axis,
        calls=total(row.calls for row in rows),
        payload_bytes=total(row.payload_bytes for row in rows),
        seconds=total(row.seconds for row in rows),
        byte_share=_total((row.byte_share, 1.0) for row in rows),
        time_share=total(row.time_share for row in rows),
    )


def _operator_columns(ranks: Iterable[RankSnapshot]) -> Mapping[tuple[str, str], _RankTotals]:
    columns: dict[tuple[str, str], _RankTotals] = {}
    for rank in ranks:
        for total in rank.collectives:
            key = (total.axis, total.operator)
            column = columns.get(key)
            if column is None:
                column = columns[key] = _RankTotals()
            column.add(rank.rank, total)
    return columns


def _row(
    key: tuple[str, str],
    column: _RankTotals | None,
    expected: ExpectedTraffic | None,
    job: JobSnapshot,
    *,
    all_bytes: float,
    step_s: float | None,
) -> TrafficRow:
    axis, operator = key
    column = column or _RankTotals()
    sizes = [
        (size, rank)
        for rank, size in zip(column.ranks, column.bytes, strict=True)
        if size is not None
    ]
    payload, calls = mean(column.bytes), mean(column.calls)
    seconds = mean(column.seconds) if calls else None
    verdict = judge(payload, expected, job, is_seen=bool(column.ranks))
    least = min(sizes, default=None)
    most = max(sizes, key=lambda item: (item[0], -item[1]), default=None)
    return TrafficRow(
        axis=axis,
        operator=operator,
        num_groups=len(column.groups),
        num_ranks=len(column.ranks),
        calls=calls,
        payload_bytes=payload,
        least=None if least is None else (least[1], least[0]),
        most=None if most is None else (most[1], most[0]),
        seconds=seconds,
        wire_bytes_per_second=_wire_speed(column, operator, _group_size(column, axis, job)),
        byte_share=sum(size for size, _ in sizes) / all_bytes if sizes and all_bytes else None,
        time_share=seconds / step_s if seconds is not None and step_s else None,
        expected_bytes=None if expected is None else expected.payload_bytes,
        why=None if expected is None else expected.why,
        verdict=verdict,
        reason=explain(verdict, payload, expected, calls, job),
    )


def _group_size(column: _RankTotals, axis: str, job: JobSnapshot) -> int | None:
    """Return how many ranks take part: fewer than the axis has where it is cut into groups."""
    sizes = group_sizes(job)
    found = [sizes[axis, group] for group in column.groups if (axis, group) in sizes]
    return max(found, default=axis_size(job, axis))


def _wire_speed(column: _RankTotals, operator: str, size: int | None) -> float | None:
    if is_point_to_point(operator):
        size = 2
    if size is None:
        return None
    pairs = [
        (moved, seconds)
        for moved, seconds in zip(column.bytes, column.seconds, strict=True)
        if moved and seconds
    ]
    seconds = sum(seconds for _, seconds in pairs)
    moved = sum(moved for moved, _ in pairs)
    return moved * wire_factor(operator, size) / seconds if seconds else None


def _sum(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left + right


def _total(parts: Iterable[tuple[float | None, float]]) -> float | None:
    total = 0.0
    for value, weight in parts:
        if value is None:
            return None
        total += value * weight
    return total
