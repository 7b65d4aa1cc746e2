"""One cell of a map of ranks, and what explains it: a shade, and a figure where there is room.

A shade is a character of its own in a colour of its own, so a map reads without colours; in ASCII
it is a digit.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from boltmesh.tui.drawing.line import Line, Role, fit
from boltmesh.tui.drawing.look import Look
from boltmesh.tui.drawing.ranks import rank_state
from boltmesh.tui.figures.heat import Heat, HeatValue, Mark
from boltmesh.tui.state import State

PLACE_FROM_WIDTH = 64
"""From here on the selected rank's place in the mesh is told."""

_SHADES = 2
"""Cells of shade before a figure; a terminal's cells are twice as high as wide."""

_HEAT_ROLES: tuple[Role, ...] = ("heat1", "heat2", "heat3", "heat4", "heat5")


def cell_widths(shown: Heat) -> tuple[int, int, int]:
    """Return the widths that cells may have: with the figure, of two shades, of one."""
    return _SHADES + 1 + shown.widest + 1, _SHADES, 1


def cell_shades(
    shown: Heat, rank: int, width: int, look: Look, *, is_selected: bool
) -> tuple[str, Role]:
    """Return the shade of a rank as it stands in a cell, and its role."""
    glyph, role = _shade(shown.values[rank], shown, look)
    if not is_selected:
        return glyph * min(width, _SHADES), role
    return (look.glyphs.cursor + glyph if width >= _SHADES else glyph), "selected"


def draw_cell(shown: Heat, rank: int, width: int, look: Look, *, is_selected: bool) -> Line:
    """Return the shade of a rank, and its figure where the cell is wide enough."""
    shades, role = cell_shades(shown, rank, width, look, is_selected=is_selected)
    line = Line(shades, role)
    if width > _SHADES:
        text = fit(shown.values[rank].text, width - _SHADES - 2, ellipsis=look.glyphs.ellipsis)
        line.add(" " + text, "selected" if is_selected else "text" if text else "muted")
    return line


def _shade(value: HeatValue, shown: Heat, look: Look) -> tuple[str, Role]:
    glyphs = look.glyphs
    if value.mark is not None:
        return _mark(value.mark, look)
    if value.level is None:
        return "?", "muted"
    step = min(len(glyphs.shades) - 1, int(value.level * len(glyphs.shades)))
    colour = min(len(_HEAT_ROLES) - 1, int(value.level * len(_HEAT_ROLES)))
    # The warm end of the colours is where it hurts.
    return glyphs.shades[step], _HEAT_ROLES[colour if shown.is_bad_high else -1 - colour]


def shade_of(level: float, shown: Heat, look: Look) -> tuple[str, Role]:
    """Return the sign and the role of a place on the scale, from 0 to 1."""
    return _shade(HeatValue("", level, None), shown, look)


def _mark(mark: Mark, look: Look) -> tuple[str, Role]:
    if mark == "not finite":
        return "~", "bad"
    if mark == "failed":  # often because of the one that died, which is marked otherwise
        return "!", "bad"
    sign = rank_state(mark, _with_signs(look))
    return sign.plain[0], sign.spans[0].role


def _with_signs(look: Look) -> Look:
    # A map is made of signs, also where words go without them.
    return msgspec.structs.replace(look, has_signs=True)


def worst_rank(ranks: Iterable[int], shown: Heat) -> int:
    """Return the rank that stands for the others of its cell."""

    def badness(rank: int) -> tuple[bool, float]:
        value = shown.values[rank]
        level = -1.0 if value.level is None else value.level
        is_marked = value.mark not in {None, "running", "finished"}
        return is_marked, level if shown.is_bad_high or value.level is None else 1 - level

    return max(ranks, key=badness)


def draw_legend(shown: Heat, look: Look, *, ranks_per_cell: int = 1) -> list[Line]:
    """The ends of the scale, what other signs mean, and whom a cell stands for."""
    parts: list[Line] = []
    if shown.low:
        shades = look.glyphs.shades
        scale = Line(f"{shown.low} ", "muted")
        for place in range(len(shades)):
            level = (place + 0.5) / len(shades)
            scale.add(*shade_of(level, shown, look))
        parts.append(scale.add(f" {shown.high}", "muted"))
    if ranks_per_cell > 1:
        parts.append(Line(f"each cell the worst of {ranks_per_cell}", "muted"))
    counts = Counter(value.mark for value in shown.values.values() if value.mark is not None)
    for mark, count in sorted(counts.items()):
        sign, role = _mark(mark, look)
        parts.append(Line(f"{sign} ", role).add(f"{count} {mark}", "muted"))
    is_unknown = any(value.level is None and value.mark is None for value in shown.values.values())
    if is_unknown:
        parts.append(Line("? not known", "muted"))
    return parts


def about_rank(state: State, shown: Heat, selected: int | None, width: int) -> Line:
    """Say which rank is selected, where it stands, and its figure."""
    rank = next((rank for rank in state.job.ranks if rank.rank == selected), None)
    if rank is None:
        return Line()
    line = Line(f"rank {rank.rank} ", "strong")
    mesh = state.job.mesh
    places = [f"{axis} {at}" for axis, at in rank.coordinates.items() if mesh.get(axis, 1) > 1]
    # On one axis the place is the rank itself.
    if len(places) > 1 and width >= PLACE_FROM_WIDTH:
        line.add(f"({', '.join(places)}) ", "muted")
    return line.add(shown.values[rank.rank].text, "strong")
