"""What each axis of the mesh moves in a step, beside what it should."""

from collections.abc import Iterable, Sequence

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui.figures.memo import remember_last
from boltmesh.tui.figures.traffic import TrafficRow, traffic_rows
from boltmesh.tui.figures.wire import axis_size


class AxisRow(msgspec.Struct, frozen=True, kw_only=True):
    """One axis in one optimizer step, the mean over the ranks that count it."""

    axis: str
    size: int | None
    """Ranks of one of its groups; None for what is no axis of the mesh."""
    operators: tuple[str, ...]
    """That ran on it, those that move the most first."""
    calls: float | None
    payload_bytes: float | None
    expected_bytes: float | None
    """None where the strategy states nothing of it."""
    time_share: float | None
    """Of the step; None where ends of operators are not known."""
    byte_share: float | None
    """Of all payload of all ranks."""
    rows: tuple[TrafficRow, ...]
    """By operator."""

    @property
    def wrong(self) -> tuple[TrafficRow, ...]:
        """The operators that move something else than the strategy says."""
        return tuple(row for row in self.rows if row.is_wrong)


@remember_last
def axis_rows(job: JobSnapshot) -> list[AxisRow]:
    """Return the axes of more than one rank, outermost first, then what else ranks move.

    An axis on which nothing was counted yet is there all the same.
    """
    rows = traffic_rows(job)
    axes = [axis for axis, size in job.mesh.items() if size > 1]
    axes += [row.axis for row in rows]
    return [
        _axis(axis, [row for row in rows if row.axis == axis], job) for axis in dict.fromkeys(axes)
    ]


def rank_bytes(job: JobSnapshot, rank: int | None) -> dict[str, float]:
    """Return what one rank moves in a step, by axis; what is not known is not in it."""
    found: dict[str, float] = {}
    for each in next((each.collectives for each in job.ranks if each.rank == rank), ()):
        if each.bytes_per_step is not None:
            found[each.axis] = found.get(each.axis, 0.0) + each.bytes_per_step
    return found


def _axis(axis: str, rows: Sequence[TrafficRow], job: JobSnapshot) -> AxisRow:
    return AxisRow(
        axis=axis,
        size=axis_size(job, axis),
        operators=tuple(row.operator.strip("_") for row in rows if row.num_ranks),
        calls=_sum(row.calls for row in rows if row.num_ranks),
        payload_bytes=_sum(row.payload_bytes for row in rows if row.num_ranks),
        expected_bytes=_sum(row.expected_bytes for row in rows if row.expected_bytes is not None),
        time_share=_sum(row.time_share for row in rows if row.num_ranks),
        byte_share=_sum(row.byte_share for row in rows if row.num_ranks),
        rows=tuple(rows),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum; None where one part is not known, or there is no part."""
    total: float | None = None
    for value in values:
        if value is None:
            return None
        total = value if total is None else total + value
    return total
