"""Work of the ranks of the context axis, and the largest messages of its collectives."""

from typing import NamedTuple

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot, operator_name
from boltmesh.tui import units
from boltmesh.tui.metrics.step_time import middle, rank_profiles
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, heading
from boltmesh.tui.render.table import AS_IT_COMES, Column, browse
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

AXIS = "context"
CONTEXT_COLUMNS = ("rank", "part", "compute", "work", "comm", "bytes", "largest", "message")
"""Titles that the table can be sorted by."""


class ContextWork(NamedTuple):
    """One rank of the axis."""

    rank: int
    part: int
    """Its place on the axis, which determines its positions."""
    compute_s: float | None
    """Seconds of a step without waiting."""
    work: float | None
    """Compute time over the median of the ranks, less one."""
    exposed_s: float | None
    """Exposed communication of a step, on all axes."""
    step_bytes: float | None
    """Payload on the axis per step."""
    largest: str
    """The operator with the largest messages on the axis."""
    message_bytes: float | None
    """The mean of its messages."""


def context_rows(job: JobSnapshot) -> list[ContextWork]:
    """Return a row for each rank."""
    profiles = rank_profiles(job)
    times = {rank: profile.own_s for rank, profile in profiles.items()}
    typical = middle(times.values()) if times else 0.0
    rows = []
    for rank in job.ranks:
        profile, own_s = profiles.get(rank.rank), times.get(rank.rank)
        operator, message = _largest(rank)
        known = [t.bytes_per_step for t in rank.collectives if t.axis == AXIS]
        rows.append(
            ContextWork(
                rank=rank.rank,
                part=rank.coordinates.get(AXIS, 0),
                compute_s=own_s,
                work=None if own_s is None or not typical else own_s / typical - 1,
                exposed_s=None if profile is None else profile.phases.get("communication", 0.0),
                step_bytes=sum(each for each in known if each is not None) if known else None,
                largest=operator,
                message_bytes=message,
            )
        )
    return rows


def _largest(rank: RankSnapshot) -> tuple[str, float | None]:
    means = [
        (total.payload_bytes / total.calls, operator_name(total.operator))
        for total in rank.collectives
        if total.axis == AXIS and total.calls
    ]
    size, operator = max(means, default=(None, units.UNKNOWN))
    return operator, size


def shown_context(state: State, table: TableView) -> list[ContextWork]:
    """Return the filtered and sorted ranks."""
    return arrange_rows(context_rows(state.job), _cells, table)


def _cells(row: ContextWork) -> Cells:
    return {
        "rank": row.rank,
        "part": row.part,
        "compute": row.compute_s,
        "work": row.work,
        "comm": row.exposed_s,
        "bytes": row.step_bytes,
        "largest": row.largest,
        "message": row.message_bytes,
    }


def draw_context(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """A row for each rank: its compute time beside the others', and its exchanges."""
    shown = shown_context(state, table)
    columns = [
        Column("rank", is_number=True),
        Column("part", is_number=True),
        Column("compute", is_number=True),
        Column("work", is_number=True),
        Column("comm", is_number=True),
        Column("bytes", is_number=True),
        Column("largest", shrinks_to=8),
        Column("message", is_number=True),
    ]
    top = int(look.has_headings)
    seen = browse(
        columns,
        shown,
        lambda row: [
            str(row.rank),
            str(row.part),
            units.seconds(row.compute_s),
            units.UNKNOWN if row.work is None else f"{row.work:+.0%}",
            units.seconds(row.exposed_s),
            units.traffic(row.step_bytes),
            row.largest,
            units.traffic(row.message_bytes),
        ],
        width,
        height - top - 1,
        look,
        table,
    )
    lines = [seen.header, *seen.lines]
    if top:
        lines.insert(0, heading("work of the context axis", width, look, right=seen.hidden))
    return lines[:height]
