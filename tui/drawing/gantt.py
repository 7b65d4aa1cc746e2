"""A step of the pipeline over time: a row for each rank, a block for each microbatch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from boltmesh.tui import units
from boltmesh.tui.drawing.line import Line, Role
from boltmesh.tui.drawing.look import Look, heading, wrap_facts
from boltmesh.tui.drawing.pipeline import fit_rows, nothing_to_show, row_names, step_text
from boltmesh.tui.figures.gantt import Bar, Gantt, GanttRow, gantt
from boltmesh.tui.state import State

_ROLES: dict[str, Role] = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "optimizer",
}
_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
Placed = tuple[Bar, int, int]
"""A bar, its first cell, and how many it has."""
Texts = Callable[[Bar], str]
LINES_WITH_AXIS = 3
LINES_WITH_LEGEND = 5


def draw_gantt(state: State, width: int, height: int, look: Look) -> list[Line]:
    """The rows, and where there is room a time axis and what the signs mean."""
    found = gantt(state)
    if found is None:
        return nothing_to_show(state, "last step", width, height, look)
    lines = [heading(_title(found), width, look)] if look.has_headings and height >= 2 else []
    room = max(0, height - len(lines))
    axis, legend = int(room >= LINES_WITH_AXIS), int(room >= LINES_WITH_LEGEND)
    names = row_names([(row.rank, row.stages) for row in found.rows], width)
    drawn = draw_rows(found.rows, names, found.window_s, width - len(names[0]), width, look)
    lines += fit_rows(drawn.rows, room - axis - legend, width)
    if axis:
        lines.append(_axis(found.window_s, len(names[0]), width))
    if legend:
        lines += drawn.legend[:1]
    return [line.crop(width) for line in lines[:height]]


class Drawn(NamedTuple):
    """Rows of blocks, and what their signs mean."""

    rows: list[Line]
    legend: list[Line]


def draw_rows(
    rows: Sequence[GanttRow],
    names: Sequence[str],
    window_s: float,
    cells: int,
    width: int,
    look: Look,
) -> Drawn:
    """The blocks of each rank behind its name, in so many cells; later ones are left out."""
    placed = [_place(row.bars, window_s, cells) for row in rows]
    texts = _texts(rows, placed)
    return Drawn(
        [
            Line(name, "muted").join(_row(bars, cells, texts, look))
            for name, bars in zip(names, placed, strict=True)
        ],
        _legend(rows, width, look, texts),
    )


def _title(found: Gantt) -> str:
    word = "last step" if found.is_whole else "the step in which it stopped"
    return f"{word}: {step_text(found.step, found.place, found.num_pipelines)}"


def _row(placed: Sequence[Placed], cells: int, texts: Texts, look: Look) -> Line:
    line = Line()
    drawn = 0
    for bar, first, size in placed:
        line.add(look.glyphs.idle * (first - drawn), "faint")
        # One cell at least keeps the pattern, which is what tells a forward from a backward.
        text = texts(bar) if len(texts(bar)) < size else ""
        line.add(text + look.glyphs.chunks[bar.kind] * (size - len(text)), _ROLES[bar.kind])
        drawn = first + size
    return line.add(look.glyphs.idle * (cells - drawn), "faint")


def _microbatch(bar: Bar) -> str:
    return str(bar.microbatch)


def _stage_and_microbatch(bar: Bar) -> str:
    return f"{bar.stage}.{bar.microbatch}"


def _texts(rows: Sequence[GanttRow], placed: Sequence[Sequence[Placed]]) -> Texts:
    """Name the stage too where ranks have several, if each of the blocks has room for that."""
    if not any(len(row.stages) > 1 for row in rows):
        return _microbatch
    has_room = all(len(_stage_and_microbatch(bar)) < size for row in placed for bar, _, size in row)
    return _stage_and_microbatch if has_room else _microbatch


def _place(bars: Sequence[Bar], window_s: float, cells: int) -> list[Placed]:
    """Return the bars that have a cell, with their first cell and their number of cells.

    Every edge is rounded by itself, so a bar stands where it belongs however many precede it.
    """
    if window_s <= 0 or cells < 1:
        return []
    placed = []
    free = 0
    for bar in bars:
        first = max(free, round(bar.start_s / window_s * cells))
        last = min(cells, round(bar.end_s / window_s * cells))
        if last > first:
            placed.append((bar, first, last - first))
            free = last
    return placed


def _axis(window_s: float, indent: int, width: int) -> Line:
    """The start, the end, and as many times between as have room."""
    cells = width - indent
    end = units.seconds(window_s)
    line = Line(" " * indent)
    parts = max(1, min(4, cells // (3 * len(end))))
    for part in range(parts):
        text = "0" if part == 0 else units.seconds(window_s * part / parts)
        line.pad_to(indent + cells * part // parts).add(text, "muted")
    return line.pad_to(width - len(end)).add(end, "muted")


def _legend(rows: Sequence[GanttRow], width: int, look: Look, texts: Texts) -> list[Line]:
    kinds = {bar.kind for row in rows for bar in row.bars}
    digits = "digits: stage.microbatch" if texts is _stage_and_microbatch else "digits: microbatch"
    parts = [
        Line(look.glyphs.chunks[kind] * 2, _ROLES[kind]).add(f" {_WORDS[kind]}", "muted")
        for kind in "FBIW"
        if kind in kinds
    ]
    parts.append(Line(look.glyphs.idle * 2, "faint").add(" idle", "muted"))
    return wrap_facts([*parts, Line(digits, "muted")], width)
