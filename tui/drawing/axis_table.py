"""What each axis of the mesh moves in a step, measured beside expected."""

from boltmesh.tui import units
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look, heading
from boltmesh.tui.drawing.table import Cell, Column, draw_table
from boltmesh.tui.drawing.traffic_table import difference_words, nothing_sent, uncounted_note
from boltmesh.tui.figures.axes import AxisRow, axis_rows, rank_bytes
from boltmesh.tui.state import State


def draw_axes(
    state: State, width: int, height: int, look: Look, *, selected: int | None = None
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
        *([Column(f"rank {selected}", is_number=True, rank=2)] if own else []),
        Column("of bytes", is_number=True, rank=6),
        *([Column("of step", is_number=True, rank=3)] if has_time else []),
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


def verdict(row: AxisRow, look: Look) -> Line:
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
        return Line(f"{look.sign(look.glyphs.equal)}equal{rest}", "good")
    return Line("not stated" if row.rows else "nothing yet", "muted")


def _share(share: float | None) -> str:
    if share is None:
        return units.UNKNOWN
    return "<1%" if 0 < share < 0.005 else units.percent(100 * share)
