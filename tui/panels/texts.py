"""Lines of text as tables: the output of ranks, and the config of the run."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui import units
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, heading, sentence
from boltmesh.tui.render.table import AS_IT_COMES, Cell, Column, browse, selected_row
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

Row = TypeVar("Row")

OUTPUT_COLUMNS = ("rank", "time", "output")
CONFIG_COLUMNS = ("key", "value")
"""Titles that the tables can be sorted by."""

MAX_WORDS = 6
"""Lines of the selected row in full."""
ROWS_BEFORE_WORDS = 3
"""Where fewer rows would be left, it is not shown in full."""


class OutputLine(NamedTuple):
    """A line that a rank has printed."""

    rank: int
    time: str
    text: str


class Entry(NamedTuple):
    """One thing that is said of a run."""

    key: str
    value: str


def output_lines(job: JobSnapshot) -> list[OutputLine]:
    """Return the newest lines of all ranks, the newest first."""
    lines = []
    for rank in job.ranks:
        for text in reversed(rank.output):
            time, _, rest = text.partition(" ")
            lines.append(OutputLine(rank.rank, time, rest))
    # Lines of one rank stay in their order.
    return sorted(lines, key=lambda line: line.time, reverse=True)


def draw_output(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """The newest lines that the ranks have printed; the selected one in full below."""
    shown = shown_output(state, table)
    chosen = selected_row(shown, table)
    return _draw(
        "output",
        [Column("rank", is_number=True), Column("time"), Column("output")],
        shown,
        lambda row: [str(row.rank), Line(row.time, "muted"), row.text],
        "" if chosen is None else chosen.text,
        width,
        height,
        look,
        table,
    )


def shown_output(state: State, table: TableView) -> list[OutputLine]:
    """Return the filtered and sorted lines."""
    return arrange_rows(output_lines(state.job), _output_cells, table)


def _output_cells(line: OutputLine) -> Cells:
    return {"rank": line.rank, "time": line.time, "output": line.text}


def config_entries(job: JobSnapshot) -> list[Entry]:
    """Return the known facts about the start of the job."""
    found = [
        Entry("name", job.name),
        Entry("id", job.id),
        Entry("user", job.user),
        Entry("recipe", job.recipe or units.UNKNOWN),
        Entry("command", " ".join(job.command)),
        Entry("working directory", job.folder),
        Entry("strategy", job.strategy),
        Entry("mesh", units.mesh(job.mesh, job.world_size)),
        Entry("max_steps", units.count(job.max_steps)),
        Entry("checkpoint", job.checkpoint or units.UNKNOWN),
        *(Entry(name, value) for name, value in sorted(job.hyperparameters.items())),
        *(Entry(f"version of {name}", value) for name, value in sorted(job.versions.items())),
    ]
    return [entry for entry in found if entry.value != units.UNKNOWN]


def draw_config(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """Keys and values of the run; the selected one in full below."""
    shown = shown_config(state, table)
    chosen = selected_row(shown, table)
    return _draw(
        "config of the run",
        [Column("key", shrinks_to=16), Column("value", shrinks_to=24)],
        shown,
        lambda row: [Line(row.key, "muted"), row.value],
        "" if chosen is None else f"{chosen.key}: {chosen.value}",
        width,
        height,
        look,
        table,
    )


def shown_config(state: State, table: TableView) -> list[Entry]:
    """Return the filtered and sorted entries."""
    return arrange_rows(
        config_entries(state.job), lambda entry: {"key": entry.key, "value": entry.value}, table
    )


def _draw(
    name: str,
    columns: Sequence[Column],
    shown: Sequence[Row],
    cells: Callable[[Row], list[Cell]],
    chosen: str,
    width: int,
    height: int,
    look: Style,
    table: TableView,
) -> list[Line]:
    words = sentence(chosen, width, look, role="muted", max_lines=MAX_WORDS) if chosen else []
    top = int(look.has_headings)
    words = words if height > top + len(words) + 1 + min(len(shown), ROWS_BEFORE_WORDS) else []
    room = height - top - 1 - len(words) - bool(words)
    seen = browse(columns, shown, cells, width, room, look, table)
    lines = [seen.header, *seen.lines]
    if top:
        lines.insert(0, heading(name, width, look, right=seen.hidden))
    if not shown and not table.filter:
        lines.append(Line("nothing", "muted").crop(width))
    return [*lines, *([Line(), *words] if words else [])][:height]
