"""What the two drawings of a pipeline share: names, and the line that says why there is none."""

from collections.abc import Mapping, Sequence

from boltmesh.tui import units
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, heading, sentence
from boltmesh.tui.state import State

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
