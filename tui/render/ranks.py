"""Ranks in words and numbers: the table of a summary, and the words of every table of ranks.

``nothing_to_show`` and ``row_names`` are shared by the two drawings of a pipeline.
"""

from collections.abc import Mapping, Sequence

from boltmesh.telemetry.snapshot import PHASES
from boltmesh.tui import units
from boltmesh.tui.metrics.ranks import RankRow, ShownState
from boltmesh.tui.render.bars import phase_role
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.style import Style, heading, sentence
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


LONG_NAMES_FROM_WIDTH = 60
NO_PIPELINE = "no pipeline: each rank runs all layers, so no stage waits for another"


def nothing_to_show(state: State, title: str, width: int, height: int, look: Style) -> list[Line]:
    """Say why no step of a pipeline is shown."""
    lines = [heading(title, width, look)] if look.has_headings and height >= 2 else []
    return [*lines, *sentence(_why_nothing(state), width, look, role="muted")][: max(0, height)]


def _why_nothing(state: State) -> str:
    size = state.job.mesh.get("pipeline", 1)
    if size <= 1:
        return NO_PIPELINE
    recording = sum(1 for rank in state.job.ranks if rank.chunks)
    if not recording:
        return "no microbatch recorded yet: nothing to show of the pipeline"
    return (
        f"no step yet that all {size} ranks of a pipeline have recorded whole "
        f"({recording} of {state.job.world_size} ranks have recorded microbatches)"
    )


def row_names(ranks: Sequence[tuple[int, tuple[int, ...]]], width: int) -> list[str]:
    """Name ranks and their stages, all names equally long; in narrow places by number alone."""
    if width < LONG_NAMES_FROM_WIDTH:
        names = [f"r{rank}" for rank, _ in ranks]
    else:
        names = [f"rank {rank}  {_stages(stages)}".rstrip() for rank, stages in ranks]
    longest = max(map(len, names), default=0)
    return [name.ljust(longest + 1) for name in names]


def _stages(stages: tuple[int, ...]) -> str:
    if not stages:
        return ""
    word = "stage" if len(stages) == 1 else "stages"
    return f"{word} {','.join(map(str, stages))}"


def step_text(step: int, batch: int, place: Mapping[str, int], num_pipelines: int) -> str:
    """Name a step, of accumulated batches which one, and of several pipelines the one shown."""
    text = f"step {units.count(step)}"
    if batch:
        text += f", batch {batch + 1} of it"
    return text + where_text(place, num_pipelines)


def where_text(place: Mapping[str, int], num_pipelines: int) -> str:
    """Name the pipeline that is shown of several."""
    if num_pipelines == 1:
        return ""
    where = ", ".join(f"{axis} {at}" for axis, at in place.items())
    return f", {where}: the slowest of {num_pipelines} pipelines"


def fit_rows(rows: Sequence[Line], room: int, width: int) -> list[Line]:
    """Return as many rows as there is room for; the last one says how many are left out."""
    if len(rows) <= room or room < 2:
        return list(rows[: max(0, room)])
    left_out = len(rows) - room + 1
    return [*rows[: room - 1], Line(f"{left_out} more", "muted").crop(width)]
