"""What each axis of the mesh moves in a step, measured beside expected.

What each axis of the mesh moves in a step, beside what it should.
"""

from collections.abc import Iterable, Sequence

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui import units
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.traffic import TrafficRow, axis_size, traffic_rows
from boltmesh.tui.panels.traffic import difference_words, nothing_sent, uncounted_note
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, heading
from boltmesh.tui.render.table import Cell, Column, draw_table
from boltmesh.tui.state import State


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
        operators=tuple(units.operator(row.operator) for row in rows if row.num_ranks),
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


def draw_axes(
    state: State, width: int, height: int, look: Style, *, selected: int | None = None
) -> list[Line]:
    """A line for each axis; the selected rank's own bytes beside the mean of all."""
    lines = [heading("communication by axis, per step", width, look)] if look.has_headings else []
    note = uncounted_note(state, width, look)
    if note is not None:
        return [*lines, note][: max(0, height)]
    rows = axis_rows(state.job)
    if not rows:
        return [*lines, Line(nothing_sent(state), "muted").crop(width)][: max(0, height)]
    own = rank_bytes(state.job, selected)
    has_time = any(row.time_share is not None for row in rows)
    columns = [
        Column("axis"),
        Column("ranks", is_number=True, rank=4),
        Column("calls", is_number=True, rank=5),
        Column("measured", is_number=True),
        Column("expected", is_number=True, rank=1),
        Column(""),
        *([Column(f"rank {selected}", is_number=True, rank=3)] if own else []),
        Column("share of bytes", is_number=True, rank=2),
        *([Column("share of step", is_number=True, rank=3)] if has_time else []),
        Column("operators", rank=7, shrinks_to=12),
    ]
    cells: list[list[Cell]] = [
        [
            row.axis,
            units.count(row.size),
            units.count(None if row.calls is None else round(row.calls, 1)),
            units.traffic(row.payload_bytes),
            Line(units.traffic(row.expected_bytes), "muted"),
            verdict(row, look),
            *([units.traffic(own.get(row.axis))] if own else []),
            _share(row.byte_share),
            *([_share(row.time_share)] if has_time else []),
            Line(", ".join(row.operators), "muted"),
        ]
        for row in rows
    ]
    lines += draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    return lines[: max(0, height)]


def verdict(row: AxisRow, look: Style) -> Line:
    """Say whether an axis moves what it should, as a sign and words."""
    wrong = row.wrong
    if wrong:
        words = difference_words(wrong[0]) if len(wrong) == 1 else f"{len(wrong)} operators differ"
        return Line(look.sign(look.glyphs.differs) + words, "bad")
    verdicts = {each.verdict for each in row.rows}
    if "pending" in verdicts:
        return Line("counting", "muted")
    if "equal" in verdicts:
        rest = "" if verdicts == {"equal"} else ", as far as stated"
        return Line(f"{look.sign(look.glyphs.equal)}as expected{rest}", "good")
    return Line("no formula" if row.rows else "nothing yet", "muted")


def _share(share: float | None) -> str:
    if share is None:
        return units.UNKNOWN
    return "<1%" if 0 < share < 0.005 else units.percent(100 * share)
