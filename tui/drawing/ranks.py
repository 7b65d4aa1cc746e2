"""One line for each rank: what its device does, where it is, and whether it is alive."""

from boltmesh.telemetry.snapshot import RankState
from boltmesh.tui import units
from boltmesh.tui.drawing.bars import bar, phase_role
from boltmesh.tui.drawing.glyphs import Glyphs
from boltmesh.tui.drawing.line import Line, Role
from boltmesh.tui.drawing.look import Look, heading
from boltmesh.tui.drawing.table import Column, draw_table
from boltmesh.tui.figures.ranks import RankRow, rank_rows
from boltmesh.tui.state import State

BARS_FROM_WIDTH = 110
BAR_WIDTH = 8
NEARLY_FULL = 0.95
"""From this share of a GPU's memory on, the figure warns."""


def draw_ranks(
    state: State, width: int, height: int, look: Look, *, first: int = 0
) -> list[Line]:
    """The ranks from the ``first`` on; where some do not fit, those in trouble stand before others."""
    rows = rank_rows(state)
    lines: list[Line] = []
    room = height - 1 - (1 if look.has_headings else 0)
    shown = rows
    if len(rows) > room:
        shown = sorted(rows, key=lambda row: row.state in {"running", "starting", "finished"})
        first = min(first, max(0, len(rows) - room))
        shown = shown[first : first + max(0, room)]
    if look.has_headings:
        lines.append(heading("ranks", width, look, right=_hidden(len(rows), shown, first, look)))
    elif hidden := _hidden(len(rows), shown, first, look):
        return _with_note(state, shown, width, look, hidden)[:height]
    lines += ranks_table(state, shown, width, look, bar_width=BAR_WIDTH)
    return lines[:height]


def ranks_table(
    state: State, rows: list[RankRow], width: int, look: Look, *, bar_width: int
) -> list[Line]:
    """A header and a line for each of ``rows``; ``bar_width`` 0 leaves only words and numbers."""
    glyphs = look.glyphs
    if width < BARS_FROM_WIDTH:
        bar_width = 0
    axes = [axis for axis, size in state.job.mesh.items() if size > 1]
    if len(axes) < 2:  # on one axis the coordinate is the rank itself
        axes = []
    columns = [
        Column("rank", is_number=True),
        *(Column(axis, is_number=True, rank=3) for axis in axes),
        Column("device", rank=5, shrinks_to=10),
        Column("util", is_number=bar_width == 0, rank=1),
        Column("memory", is_number=bar_width == 0, rank=2),
        Column("step", is_number=True),
        Column("phase", rank=3),
        Column("loss", is_number=True, rank=4),
        Column("state"),
    ]
    cells = [
        [
            str(row.rank),
            *(str(row.coordinates.get(axis, units.UNKNOWN)) for axis in axes),
            Line(row.device, "muted"),
            _utilization(row, bar_width, glyphs),
            _memory(row, bar_width, glyphs),
            units.seconds(row.step_s),
            _phase(row, glyphs),
            units.number(row.loss),
            rank_state(row.state, glyphs),
        ]
        for row in rows
    ]
    return draw_table(columns, cells, width, ellipsis=glyphs.ellipsis)


def rank_state(state: RankState, glyphs: Glyphs) -> Line:
    """A rank's state as a sign and a word."""
    signs: dict[RankState, tuple[str, Role]] = {
        "starting": (glyphs.absent, "muted"),
        "running": (glyphs.running, "good"),
        "finished": (glyphs.finished, "good"),
        "failed": (glyphs.failed, "bad"),
        "dead": (glyphs.failed, "bad"),
        "missing": (glyphs.absent, "warn"),
    }
    sign, role = signs[state]
    return Line(f"{sign} {state}", role)


def _utilization(row: RankRow, bar_width: int, glyphs: Glyphs) -> Line:
    text = units.percent(row.utilization_percent)
    if not bar_width:
        return Line(text)
    share = None if row.utilization_percent is None else row.utilization_percent / 100
    return bar(share, bar_width, glyphs).add(text.rjust(5))


def _memory(row: RankRow, bar_width: int, glyphs: Glyphs) -> Line:
    if row.memory_used_bytes is None:
        return Line(units.UNKNOWN)
    if row.memory_total_bytes is None:
        return Line(units.memory(row.memory_used_bytes))
    share = row.memory_used_bytes / row.memory_total_bytes
    role: Role = "warn" if share >= NEARLY_FULL else "text"
    gib = 2**30
    text = f"{row.memory_used_bytes / gib:.1f}/{row.memory_total_bytes / gib:.1f} GiB"
    if not bar_width:
        return Line(text, role)
    return bar(share, bar_width, glyphs, role="chart").add(" " + text.rjust(13), role)


def _phase(row: RankRow, glyphs: Glyphs) -> Line:
    if row.phase is None:
        return Line(units.UNKNOWN, "muted")
    pattern = glyphs.phases.get(row.phase, glyphs.phases["other"])
    return Line(pattern, phase_role(row.phase)).add(f" {row.phase}")


def _hidden(total: int, shown: list[RankRow], first: int, look: Look) -> Line:
    """Say how many ranks are out of sight, and on which side."""
    above, below = first, total - first - len(shown)
    if total == len(shown):
        return Line()
    parts = [f"{look.glyphs.up} {above} more"] if above else []
    parts += [f"{look.glyphs.down} {below} more"] if below else []
    return Line("  ".join(parts), "muted")


def _with_note(
    state: State, shown: list[RankRow], width: int, look: Look, note: Line
) -> list[Line]:
    """The table, with the number of hidden ranks at the end of its header."""
    header, *rows = ranks_table(state, shown, width, look, bar_width=BAR_WIDTH)
    if header.width + 2 + note.width <= width:
        header.pad_to(width - note.width).join(note)
    return [header, *rows]
