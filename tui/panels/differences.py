"""Differences between two runs: figures, bytes by axis, settings."""

import math
from collections.abc import Callable, Iterator

import msgspec

from boltmesh.telemetry.snapshot import operator_name
from boltmesh.tui import units
from boltmesh.tui.metrics.figures import figures
from boltmesh.tui.metrics.traffic import traffic_rows
from boltmesh.tui.panels.texts import config_entries
from boltmesh.tui.panels.window import value_at
from boltmesh.tui.render.line import Line, fit
from boltmesh.tui.render.style import Style, heading
from boltmesh.tui.render.table import AS_IT_COMES, Column, browse
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

DIFFERENCE_COLUMNS = ("what", "this run", "other run", "difference")
"""Titles that the table can be sorted by."""

FIGURES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "samples_per_s": ("samples/s", units.rate),
    "tokens_per_s": ("tokens/s", units.rate),
    "step_s": ("step time", units.seconds),
    "mfu": ("MFU", units.share),
    "model_tflops": ("model TFLOP/s", units.number),
    "hfu": ("HFU", units.share),
    "hardware_tflops": ("hardware TFLOP/s", units.number),
    "bubble_ratio": ("bubble", units.share),
    "exposed_communication": ("exposed communication", units.share),
    "utilisation": ("utilisation", units.share),
    "memory_bytes": ("memory", units.memory),
}
"""Titles and forms of the headline figures."""

OF_A_RUN = ("name", "id", "checkpoint")
"""Settings that differ between any two runs; the names are in the title."""


class Difference(msgspec.Struct, frozen=True):
    """One thing, as both runs have it; None where one does not."""

    what: str
    this: str | None
    other: str | None
    ratio: float | None = None
    """This run's number over the other's, less one."""


class DifferencesReport(msgspec.Struct, frozen=True):
    """Document of ``boltmesh top A B --once --json``."""

    this: str
    other: str
    """Ids of the runs."""
    differences: tuple[Difference, ...]


def differences(state: State) -> list[Difference]:
    """Return figures, losses and bytes of both runs, then the settings that differ."""
    other = state.other
    return [] if other is None else [*_numbers(state, other), *_settings(state, other)]


def _numbers(state: State, other: State) -> Iterator[Difference]:
    for name in ("loss", "val_loss"):
        if name in state.series and name in other.series:
            step = min(each.series[name].steps[-1] for each in (state, other))
            read = [value_at(each.series[name], step) for each in (state, other)]
            yield _number(f"{name} at step {units.count(round(step))}", units.number, *read)
    found = msgspec.structs.asdict(figures(state)), msgspec.structs.asdict(figures(other))
    for name, (title, write) in FIGURES.items():
        values = [each[name].latest for each in found]
        if values != [None, None]:
            yield _number(title, write, *values)
    this, theirs = _bytes(state), _bytes(other)
    pairs = {what: [each.get(what) for each in (this, theirs)] for what in {**this, **theirs}}
    most = {what: max(filter(None, pair), default=0.0) for what, pair in pairs.items()}
    for what in sorted(most, key=most.__getitem__, reverse=True):
        yield _number(f"{what} per step and rank", units.traffic, *pairs[what])


def _bytes(state: State) -> dict[str, float]:
    """Return payload bytes of a step by axis and operator."""
    found: dict[str, float] = {}
    for row in traffic_rows(state.job):
        if row.payload_bytes is not None:
            what = f"{row.axis} {operator_name(row.operator)}"
            found[what] = found.get(what, 0.0) + row.payload_bytes
    return found


def _number(
    what: str, write: Callable[[float | None], str], this: float | None, other: float | None
) -> Difference:
    ratio = None
    if this is not None and other and math.isfinite(this) and math.isfinite(other):
        ratio = this / other - 1
    texts = [None if value is None else write(value) for value in (this, other)]
    return Difference(what, texts[0], texts[1], ratio)


def _settings(state: State, other: State) -> Iterator[Difference]:
    this, theirs = _config(state), _config(other)
    for key in (*this, *(key for key in theirs if key not in this)):
        if this.get(key) != theirs.get(key) and key not in OF_A_RUN:
            yield Difference(key, this.get(key), theirs.get(key))


def _config(state: State) -> dict[str, str]:
    found = {entry.key: entry.value for entry in config_entries(state.job)}
    plan = state.job.pipeline
    if plan is not None:
        found |= {"schedule": plan.schedule, "microbatches": units.count(plan.num_microbatches)}
    return found


def shown_differences(state: State, table: TableView) -> list[Difference]:
    """Return the filtered and sorted rows."""
    return arrange_rows(differences(state), _cells, table)


def _cells(row: Difference) -> Cells:
    return {
        "what": row.what,
        "this run": row.this,
        "other run": row.other,
        "difference": row.ratio,
    }


def difference_words(row: Difference) -> str:
    """Return how this run differs from the other one."""
    if row.ratio is None:
        return ""
    return "same" if abs(row.ratio) < 5e-4 else f"{row.ratio:+.1%}"


LABEL_WIDTH = 48
"""Cells of a name and a difference; both values share the others."""


def draw_differences(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """A row for each figure and for each setting that differs."""
    shown = shown_differences(state, table)
    top = int(look.has_headings)
    room = max(12, (width - LABEL_WIDTH) // 2)
    columns = [
        Column("what", shrinks_to=16),
        Column("this run", shrinks_to=12),
        Column("other run", shrinks_to=12),
        Column("difference", is_number=True),
    ]
    seen = browse(
        columns,
        shown,
        lambda row: [
            Line(row.what, "muted"),
            fit(row.this or units.UNKNOWN, room, ellipsis=look.glyphs.ellipsis),
            fit(row.other or units.UNKNOWN, room, ellipsis=look.glyphs.ellipsis),
            difference_words(row),
        ],
        width,
        height - top - 1,
        look,
        table,
    )
    lines = [seen.header, *seen.lines]
    if top:
        lines.insert(0, heading(_title(state), width, look, right=seen.hidden))
    return lines[:height]


def _title(state: State) -> str:
    other = state.other
    if other is None:
        return "differences"
    names = [f"{each.job.name} ({each.job.id})" for each in (state, other)]
    return f"{names[0]} beside {names[1]}"


def differences_report(state: State) -> DifferencesReport:
    """Return the same as a document."""
    assert state.other is not None
    return DifferencesReport(state.job.id, state.other.job.id, tuple(differences(state)))
