"""The whole mesh in one figure: a block for each stage, data down, tensor across."""

from boltmesh.tui.drawing.heat_cell import (
    about_rank,
    cell_shades,
    cell_widths,
    draw_legend,
    worst_rank,
)
from boltmesh.tui.drawing.line import Line, Role, fit
from boltmesh.tui.drawing.look import Look, facts, heading
from boltmesh.tui.figures.heat import HEAT_FIGURES, Heat, heat
from boltmesh.tui.figures.mesh_map import MeshMap, plan_map
from boltmesh.tui.state import State


def draw_map(
    state: State,
    width: int,
    height: int,
    look: Look,
    *,
    figure: str = HEAT_FIGURES[0],
    selected: int | None = None,
) -> list[Line]:
    """The map, under a heading that tells of the selected rank, and the scale below it."""
    shown = heat(state, figure)
    found = map_of(state, width, height, look, figure=figure)
    about = about_rank(state, shown, selected, width)
    lines: list[Line] = []
    if look.has_headings:
        axes = Line("" if found is None else found.axes, "muted")
        right = about if about.width else axes
        lines.append(heading(f"ranks by {shown.title}", width, look, right=right))
    if found is None:
        return [*lines, Line("no ranks yet", "muted").crop(width)][: max(0, height)]
    lines += _rows(found, shown, width, look, selected)
    legend = draw_legend(shown, look, ranks_per_cell=found.ranks_per_cell)
    if not look.has_headings:
        legend = [about, Line(f"by {shown.figure}", "muted"), *legend]
    elif about.width:
        axes = Line(found.axes, "muted")
        legend = [*legend, axes] if about.plain in lines[0].plain else [*legend, about, axes]
    lines.append(facts(legend, width))
    return lines[: max(0, height)]


def map_lines(
    state: State, width: int, height: int, look: Look, *, figure: str = HEAT_FIGURES[0]
) -> int:
    """How many of ``height`` lines the map would fill, its heading and its scale included."""
    found = map_of(state, width, height, look, figure=figure)
    return int(look.has_headings) + (1 if found is None else found.height + 1)


def map_of(
    state: State, width: int, height: int, look: Look, *, figure: str = HEAT_FIGURES[0]
) -> MeshMap | None:
    """Return where each rank stands in a drawing of that size, without its heading."""
    room = max(1, height - int(look.has_headings) - 1)
    return plan_map(state.job, width, room, cell_widths=cell_widths(heat(state, figure)))


def rank_on_map(
    state: State,
    width: int,
    height: int,
    x: int,
    y: int,
    *,
    look: Look,
    figure: str = HEAT_FIGURES[0],
) -> int | None:
    """Return the rank whose cell is at a place of the drawing; of several the one that it shows."""
    found = map_of(state, width, height, look, figure=figure)
    cell = None if found is None else found.cell_at(x, y - int(look.has_headings))
    return None if cell is None else worst_rank(cell.ranks, heat(state, figure))


def rank_beside(
    state: State,
    width: int,
    height: int,
    selected: int | None,
    across: int,
    down: int,
    *,
    look: Look,
    figure: str = HEAT_FIGURES[0],
) -> int | None:
    """Return the rank in the cell that is so far from the selected one's."""
    found = map_of(state, width, height, look, figure=figure)
    cell = None if found is None else found.beside(selected, across, down)
    if cell is None:
        return None
    # At an edge of the map the selected one of several stays selected.
    return selected if selected in cell.ranks else worst_rank(cell.ranks, heat(state, figure))


def _rows(found: MeshMap, shown: Heat, width: int, look: Look, selected: int | None) -> list[Line]:
    pieces: list[list[tuple[int, str, Role]]] = [[] for _ in range(found.height)]
    for label in found.labels:
        if label.y < found.height:
            pieces[label.y].append((label.x, label.text, "muted"))
    for cell in found.cells:
        rank = cell.ranks[0] if len(cell.ranks) == 1 else worst_rank(cell.ranks, shown)
        is_selected = selected in cell.ranks
        shades, role = cell_shades(shown, rank, found.cell_width, look, is_selected=is_selected)
        pieces[cell.y].append((cell.x, shades, role))
        text = _text(shown, rank, found.cell_width - len(shades) - 2, look)
        if text:
            at = cell.x + len(shades) + 1
            pieces[cell.y].append((at, text, "selected" if is_selected else "text"))
    return [_line(row).crop(width) for row in pieces]


def _text(shown: Heat, rank: int, room: int, look: Look) -> str:
    return fit(shown.values[rank].text, room, ellipsis=look.glyphs.ellipsis) if room > 0 else ""


def _line(pieces: list[tuple[int, str, Role]]) -> Line:
    """Join what stands on one line; neighbours of one role are one span, for there are many."""
    line = Line()
    text, end = "", 0
    role: Role = "text"
    for x, piece, its_role in sorted(pieces, key=lambda item: item[0]):
        if x > end or its_role != role:
            line.add(text, role)
            line.pad_to(x)
            text, role = "", its_role
        text += piece
        end = x + len(piece)
    return line.add(text, role)
