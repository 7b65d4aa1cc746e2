"""One line for each rank: what its device does, where it is, and whether it is alive."""

from boltmesh.telemetry.snapshot import PHASES, RankState
from boltmesh.tui import units
from boltmesh.tui.drawing.bars import bar, phase_role
from boltmesh.tui.drawing.glyphs import Glyphs
from boltmesh.tui.drawing.line import Line, Role
from boltmesh.tui.drawing.look import Look, heading
from boltmesh.tui.drawing.table import Cell, Column, draw_table
from boltmesh.tui.figures.ranks import RankRow, rank_rows
from boltmesh.tui.state import State

BARS_FROM_WIDTH = 110
BAR_WIDTH = 8
STEADY_FROM_WIDTH = 70
_PHASE_WIDTH = 2 + max(map(len, PHASES))
NEARLY_FULL = 0.95
"""From this share of a GPU's memory on, the figure warns."""


def draw_ranks(state: State, width: int, height: int, look: Look, *, first: int = 0) -> list[Line]:
    """The ranks from the ``first`` on; where not all fit, those in trouble stand before others."""
    rows = rank_rows(state)
    room = max(0, height - (2 if look.has_headings else 1))
    shown = rows
    if len(rows) > room:
        shown = sorted(rows, key=lambda row: row.state in {"running", "starting", "finished"})
        first = min(first, len(rows) - room)
        shown = shown[first : first + room]
    hidden = _hidden(len(rows), len(shown), first, look)
    header, *lines = ranks_table(state, shown, width, look, bar_width=BAR_WIDTH)
    if look.has_headings:
        return [heading("ranks", width, look, right=hidden), header, *lines][:height]
    if hidden.width and header.width + 2 + hidden.width <= width:
        header.pad_to(width - hidden.width).join(hidden)
    return [header, *lines][:height]


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
        Column("device", rank=5, shrinks_to=8),
        Column("", rank=6, shrinks_to=8),
        Column("util", is_number=bar_width == 0, rank=1),
        Column("memory", is_number=bar_width == 0, rank=2),
        Column("step", is_number=True, steady_width=7),
        Column("phase", rank=3, steady_width=_PHASE_WIDTH if width >= STEADY_FROM_WIDTH else 0),
        Column("loss", is_number=True, rank=4, steady_width=6),
        Column("state"),
    ]
    cells: list[list[Cell]] = [
        [
            str(row.rank),
            *(str(row.coordinates.get(axis, units.UNKNOWN)) for axis in axes),
            *split_device(row.device),
            _utilization(row, bar_width, glyphs),
            _memory(row, bar_width, glyphs),
            units.seconds(row.step_s),
            rank_phase(row.phase, look),
            units.number(row.loss),
            rank_state(row.state, look),
        ]
        for row in rows
    ]
    return draw_table(columns, cells, width, ellipsis=glyphs.ellipsis)


def rank_state(state: RankState, look: Look) -> Line:
    """A rank's state as a sign and a word."""
    glyphs = look.glyphs
    signs: dict[RankState, tuple[str, Role]] = {
        "starting": (glyphs.absent, "muted"),
        "running": (glyphs.running, "good"),
        "finished": (glyphs.finished, "good"),
        "failed": (glyphs.failed, "bad"),
        "dead": (glyphs.failed, "bad"),
        "missing": (glyphs.absent, "warn"),
    }
    sign, role = signs[state]
    return Line(look.sign(sign) + state, role)


def split_device(device: str) -> tuple[str, Line]:
    """Split ``cuda:1 (NVIDIA H100)``: the model is the same all over most jobs, and goes first."""
    name, _, model = device.partition(" (")
    return name, Line(model.removesuffix(")").removeprefix("NVIDIA "), "muted")


def _utilization(row: RankRow, bar_width: int, glyphs: Glyphs) -> Line:
    text = units.percent(row.utilization_percent)
    if not bar_width:
        return Line(text)
    if row.utilization_percent is None:  # an empty bar would say zero
        return Line(text.rjust(bar_width + 5))
    return bar(row.utilization_percent / 100, bar_width, glyphs).add(text.rjust(5))


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


def rank_phase(phase: str | None, look: Look) -> Line:
    """The phase that a rank is in as a sign and a word."""
    if phase is None:
        return Line(units.UNKNOWN, "muted")
    patterns = look.glyphs.phases
    pattern = patterns.get(phase, patterns["other"])
    return Line(look.sign(pattern), phase_role(phase)).add(phase)


def _hidden(total: int, num_shown: int, first: int, look: Look) -> Line:
    """Say how many ranks are out of sight, and on which side."""
    if total == num_shown:
        return Line()
    above, below = first, total - first - num_shown
    parts = [f"{look.glyphs.up} {above} more"] if above else []
    parts += [f"{look.glyphs.down} {below} more"] if below else []
    return Line("  ".join(parts), "muted")
