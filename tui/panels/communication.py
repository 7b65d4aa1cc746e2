"""What a step moves between the ranks, in short; ``traffic_table.py`` has all of it."""

from boltmesh.tui import units
from boltmesh.tui.metrics.verdict import TrafficRow, traffic_rows
from boltmesh.tui.panels.traffic import difference, nothing_sent, uncounted_note, wire_speed
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, heading
from boltmesh.tui.render.table import Cell, Column, draw_table
from boltmesh.tui.state import State


def draw_communication(state: State, width: int, height: int, look: Style) -> list[Line]:
    """A line for each operator on each axis, differences from the expected bytes marked."""
    lines = [heading("communication per step", width, look)] if look.has_headings else []
    rows = traffic_rows(state.job)
    note = uncounted_note(state, width, look)
    if note is not None:
        lines.append(note)
    elif not rows:
        prefix = "" if look.has_headings else "communication: "
        lines.append(Line(prefix + nothing_sent(state), "muted").crop(width))
    if rows:
        lines += communication_table(rows, width, look)
    return lines[:height]


def draw_axis(state: State, width: int, height: int, look: Style, *, axis: str) -> list[Line]:
    """The same of one axis alone."""
    lines = [heading(f"{axis} axis, per step", width, look)] if look.has_headings else []
    rows = [row for row in traffic_rows(state.job) if row.axis == axis]
    return [*lines, *communication_table(rows, width, look)][: max(0, height)]


def communication_table(rows: list[TrafficRow], width: int, look: Style) -> list[Line]:
    """A header and a line for each row."""
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
            *([wire_speed(row)] if has_speed else []),
            Line(units.traffic(row.expected_bytes), "muted"),
            difference(row, look),
            Line((row.reason if row.is_wrong else row.why) or "", "muted"),
        ]
        for row in rows
    ]
    return draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
