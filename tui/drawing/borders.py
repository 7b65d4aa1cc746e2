"""What crosses the borders of a pipeline's stages, a line for each pair of ranks."""

from boltmesh.tui import units
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look, heading
from boltmesh.tui.drawing.pipeline import fit_rows
from boltmesh.tui.drawing.table import Cell, Column, draw_table
from boltmesh.tui.figures.borders import Border, Flow, borders
from boltmesh.tui.state import State


def draw_borders(state: State, width: int, height: int, look: Look) -> list[Line]:
    """A table; nothing where no job has told what to expect."""
    found = borders(state.job)
    if not found:
        return []
    lines: list[Line] = []
    if look.has_headings and height >= 2:
        lines.append(heading("over the borders of stages, bytes per step", width, look))
    columns = [
        Column("ranks"),
        Column("stages", rank=2),
        Column("there", is_number=True),
        Column("expected", is_number=True, rank=1),
        Column("back", is_number=True),
        Column("expected", is_number=True, rank=1),
        Column("difference"),
    ]
    cells = [_cells(border, look) for border in found]
    table = draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    lines += [table[0], *fit_rows(table[1:], height - len(lines) - 1, width)]
    return lines[: max(0, height)]


def _cells(border: Border, look: Look) -> list[Cell]:
    first, second = border.ranks
    stages = ", ".join(f"{stage}-{stage + 1}" for stage in border.stages)
    return [
        Line(f"{first} - {second}", "muted"),
        Line(stages, "muted"),
        units.traffic(border.there.measured),
        Line(units.traffic(border.there.expected), "muted"),
        units.traffic(border.back.measured),
        Line(units.traffic(border.back.expected), "muted"),
        _verdict(border.there, border.back, look),
    ]


def _verdict(there: Flow, back: Flow, look: Look) -> Line:
    if there.is_equal is None or back.is_equal is None:
        return Line("counting", "muted")
    if there.is_equal and back.is_equal:
        return Line(look.sign(look.glyphs.equal) + "equal", "good")
    return Line(look.sign(look.glyphs.differs) + "differs", "bad")
