"""What a step moves between the ranks: measured, and beside it what was expected."""

from boltmesh.tui import units
from boltmesh.tui.drawing.line import Line, fit
from boltmesh.tui.drawing.look import Look, heading
from boltmesh.tui.drawing.table import Cell, Column, draw_table
from boltmesh.tui.figures.traffic import TrafficRow, traffic_rows
from boltmesh.tui.state import State


def draw_communication(state: State, width: int, height: int, look: Look) -> list[Line]:
    """A line for each operator on each axis, differences from the expected bytes marked."""
    lines = [heading("communication per step", width, look)] if look.has_headings else []
    rows = traffic_rows(state.job)
    if state.job.communication_note is not None:
        note = f"communication is not counted: {state.job.communication_note}"
        lines.append(Line(fit(note, width, ellipsis=look.glyphs.ellipsis), "warn"))
    elif not rows:
        nothing = "one rank, nothing to send" if state.job.world_size == 1 else "nothing sent yet"
        prefix = "" if look.has_headings else "communication: "
        lines.append(Line(prefix + nothing, "muted").crop(width))
    if rows:
        lines += communication_table(rows, width, look)
    return lines[:height]


def communication_table(rows: list[TrafficRow], width: int, look: Look) -> list[Line]:
    """A header and a line for each row."""
    glyphs = look.glyphs
    # Few backends tell when an operator ended; a column of nothing is left out.
    has_speed = any(row.wire_bytes_per_second is not None for row in rows)
    columns = [
        Column("axis"),
        Column("operator", shrinks_to=9),
        Column("calls", is_number=True, rank=2),
        Column("payload", is_number=True),
        *([Column("wire", is_number=True, rank=3)] if has_speed else []),
        Column("expected", is_number=True, rank=1),
        Column(""),
        Column("because", rank=4, shrinks_to=12),
    ]
    cells: list[list[Cell]] = [
        [
            row.axis,
            row.operator.strip("_"),
            units.count(None if row.calls is None else round(row.calls, 1)),
            units.traffic(row.payload_bytes),
            *([_speed(row)] if has_speed else []),
            Line(units.traffic(row.expected_bytes), "muted"),
            _verdict(row, look),
            Line(row.why or "", "muted"),
        ]
        for row in rows
    ]
    return draw_table(columns, cells, width, ellipsis=glyphs.ellipsis)


def _speed(row: TrafficRow) -> str:
    speed = row.wire_bytes_per_second
    return units.UNKNOWN if speed is None else f"{units.traffic(speed)}/s"


def _verdict(row: TrafficRow, look: Look) -> Line:
    glyphs = look.glyphs
    if row.verdict == "equal":
        return Line(look.sign(glyphs.equal) + "equal", "good")
    if row.verdict == "differs":
        ratio = row.ratio
        how = "unexpected" if ratio is None else f"{ratio:.3g}x"
        return Line(look.sign(glyphs.differs) + how, "bad")
    if row.verdict == "missing":
        return Line(look.sign(glyphs.differs) + "never seen", "bad")
    return Line("counting" if row.verdict == "pending" else "not stated", "muted")
