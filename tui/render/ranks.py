"""The ranks of a summary in words and numbers, and the words that every table of ranks uses."""

from boltmesh.telemetry.snapshot import PHASES
from boltmesh.tui import units
from boltmesh.tui.metrics.ranks import RankRow, ShownState
from boltmesh.tui.render.bars import phase_role
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.style import Style
from boltmesh.tui.render.table import Cell, Column, draw_table
from boltmesh.tui.state import State

STEADY_FROM_WIDTH = 70
_PHASE_WIDTH = 2 + max(map(len, PHASES))
NEARLY_FULL = 0.95
"""From this share of a GPU's memory on, the figure warns."""


def ranks_table(state: State, rows: list[RankRow], width: int, look: Style) -> list[Line]:
    """A header and a line for each of ``rows``."""
    axes = [axis for axis, size in state.job.mesh.items() if size > 1]
    if len(axes) < 2:  # on one axis the coordinate is the rank itself
        axes = []
    columns = [
        Column("rank", is_number=True),
        *(Column(axis, is_number=True, rank=3) for axis in axes),
        Column("device", rank=5, shrinks_to=8),
        Column("", rank=6, shrinks_to=8),
        Column("util", is_number=True, rank=1),
        Column("memory", is_number=True, rank=2),
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
            units.percent(row.utilization_percent),
            _memory(row),
            units.seconds(row.step_s),
            rank_phase(row.phase, look),
            units.number(row.loss),
            rank_state(row.state, look),
        ]
        for row in rows
    ]
    return draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)


def rank_state(state: ShownState, look: Style) -> Line:
    """A rank's state as a sign and a word."""
    glyphs = look.glyphs
    signs: dict[ShownState, tuple[str, Role]] = {
        "starting": (glyphs.absent, "muted"),
        "running": (glyphs.running, "good"),
        "finished": (glyphs.finished, "good"),
        "failed": (glyphs.failed, "bad"),
        "dead": (glyphs.failed, "bad"),
        "missing": (glyphs.absent, "warn"),
        "stalled": ("!", "warn"),
        "stopped": ("!", "warn"),
    }
    sign, role = signs[state]
    return Line(look.sign(sign) + state, role)


def split_device(device: str) -> tuple[str, Line]:
    """Split ``cuda:1 (NVIDIA H100)``: the model is the same all over most jobs, and goes first."""
    name, _, model = device.partition(" (")
    return name, Line(model.removesuffix(")").removeprefix("NVIDIA "), "muted")


def _memory(row: RankRow) -> Line:
    if row.memory_used_bytes is None:
        return Line(units.UNKNOWN)
    if row.memory_total_bytes is None:
        return Line(units.memory(row.memory_used_bytes))
    share = row.memory_used_bytes / row.memory_total_bytes
    role: Role = "warn" if share >= NEARLY_FULL else "text"
    gib = 2**30
    text = f"{row.memory_used_bytes / gib:.1f}/{row.memory_total_bytes / gib:.1f} GiB"
    return Line(text, role)


def rank_phase(phase: str | None, look: Style) -> Line:
    """The phase that a rank is in as a sign and a word."""
    if phase is None:
        return Line(units.UNKNOWN, "muted")
    patterns = look.glyphs.phases
    pattern = patterns.get(phase, patterns["other"])
    return Line(look.sign(pattern), phase_role(phase)).add(phase)
