"""How each kind of parameter is divided over the tensor axis, and why."""

from collections.abc import Sequence
from typing import NamedTuple

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.telemetry.tensor_plan import WHOLE, PlannedParameters, TensorPlanTable
from boltmesh.tui import units
from boltmesh.tui.render.line import Line, fit, fit_end
from boltmesh.tui.render.style import Style, heading, labelled, sentence, wrap_facts
from boltmesh.tui.render.table import AS_IT_COMES, GAP, Cell, Column, browse, selected_row
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

COLUMNS = ("parameter", "style", "parts", "count", "shape", "per rank", "each step", "why")
"""Titles that the table can be sorted by."""

LEAST_NAME = 22
LEAST_STEP = 14
LEAST_WHY = 24
"""Cells; with less room the words of a step and of a reason are left to the selected row."""

MOST_STEP = 28
"""Cells of the words of a step where reasons stand beside them."""

ROWS_BEFORE_WORDS = 4
"""Where fewer lines are left for the table, notes give way."""

_TITLE = 24
"""Cells that the heading takes beside the text at its right end."""

_BACKENDS = {
    "local": "on plain shards (local)",
    "region": "as DTensors (region)",
    "replicated": "whole on every rank (replicated)",
}


def draw_plan(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """The table, and under it the selected row in full, or how blocks are run and the notes."""
    plan = state.job.tensor_plan
    top = int(look.has_headings)
    if plan is None:
        lines = [heading("tensor plan", width, look)] if top else []
        lines += [line for text in nothing_planned(state.job) for line in _said(text, width, look)]
        return lines[: max(0, height)]
    shown = shown_plan(state, table)
    chosen = selected_row(shown, table)
    words = _notes(plan, width, look) if chosen is None else _detail(chosen, plan, width, look)
    room = height - top - 1  # of which the titles take one
    most = room if chosen is not None or len(words) + len(shown) <= room else max(2, room // 3)
    words = words[: max(0, min(most, room - min(len(shown), ROWS_BEFORE_WORDS)))]
    if words and room - len(words) > len(shown):
        words.insert(0, Line())
    kept = kept_words(plan)
    lines = []
    if not top:
        lines.append(kept.crop(width))
        room -= 1
    columns = _columns(plan.rows, width, look)
    seen = browse(
        [each.column for each in columns],
        shown,
        lambda row: [each.cell(row, look) for each in columns],
        width,
        room - len(words),
        look,
        table,
    )
    if top:
        right = Line().join(kept)
        if seen.hidden.width:
            right.add("  ").join(seen.hidden)
            right = right if right.width <= width - _TITLE else seen.hidden
        lines.append(heading("tensor plan", width, look, right=right))
    if shown or table.filter:
        lines += [seen.header, *seen.lines]
    else:
        lines.append(Line("it names no parameter", "muted").crop(width))
    return [*lines, *words][: max(0, height)]


def shown_plan(state: State, table: TableView) -> list[PlannedParameters]:
    """Return the filtered and sorted rows."""
    plan = state.job.tensor_plan
    return [] if plan is None else arrange_rows(plan.rows, cells_of, table)


def cells_of(row: PlannedParameters) -> Cells:
    """Return a row as it is filtered and sorted."""
    style, parts = style_and_parts(row)
    return {
        "parameter": row.pattern,
        "style": style,
        "parts": parts,
        "count": row.count,
        "shape": _shape(row),
        "per rank": row.rank_bytes,
        "each step": row.collectives,
        "why": row.why,
    }


_FIELD_WORDS = {WHOLE: "replicated", "vocabulary": "vocab-parallel"}


def style_and_parts(row: PlannedParameters) -> tuple[str, str]:
    """Part ``column of dim 0: 3x24x128`` into its first word and the rest."""
    style, _, parts = row.style.partition(" of ")
    return _FIELD_WORDS.get(style, style), parts


def kept_words(plan: TensorPlanTable) -> Line:
    """Say how much of all parameters one rank keeps."""
    kept, whole = units.memory(plan.rank_bytes), units.memory(plan.whole_bytes)
    line = Line(f"each of {plan.size} ranks keeps ", "muted")
    return line.add(kept, "strong").add(f" of {whole}", "muted")


def nothing_planned(job: JobSnapshot) -> list[str]:
    """Return the text without a plan, a sentence each."""
    size = job.mesh.get("tensor", 1)
    if size == 1:
        return [
            "This job divides no layer: its tensor axis has one rank.",
            "'boltmesh plan CONFIG --strategy tensor' shows what bolt_tensor would divide.",
        ]
    divided = f"The layers are divided over {size} ranks"
    if job.global_step == 0 and job.state == "running":
        return [f"{divided}; the plan is shown once it is proven, before the first step."]
    missing = "was started by another version, or its files were cleaned away"
    return [f"{divided}, and the job has recorded no plan of it: it {missing}."]


class _Shown(NamedTuple):
    column: Column
    texts: dict[int, str]
    """By the row's identity."""
    name: str

    def cell(self, row: PlannedParameters, look: Style) -> Cell:
        text = self.texts[id(row)]
        if self.name == "style":
            return Line(text, "muted" if row.style == WHOLE else "text")
        if self.name == "parameter":
            room = self.column.steady_width
            return Line(fit_end(text, room, ellipsis=look.glyphs.ellipsis))
        return Line(text, "muted") if self.name in {"why", "parts", "each step"} else text


def _columns(rows: Sequence[PlannedParameters], width: int, look: Style) -> list[_Shown]:
    """Return the columns that fit, each with its texts: bytes come before words, words last."""
    texts = {
        "parameter": {id(row): row.pattern for row in rows},
        "style": {id(row): style_and_parts(row)[0] for row in rows},
        "parts": {id(row): style_and_parts(row)[1] for row in rows},
        "count": {id(row): units.count(row.count) for row in rows},
        "shape": {id(row): _shape(row) for row in rows},
        "per rank": {id(row): units.memory(row.rank_bytes) for row in rows},
        "each step": {id(row): row.collectives for row in rows},
        "why": {id(row): row.why for row in rows},
    }
    widths = {
        name: max([len(name) + 2, *map(len, column.values())]) for name, column in texts.items()
    }
    kept = ["parameter", "style", "per rank"]
    least = {"each step": LEAST_STEP, "why": LEAST_WHY, "parameter": LEAST_NAME}
    needed = {name: min(size, least.get(name, size)) for name, size in widths.items()}
    left = width - sum(needed[name] for name in kept) - GAP * (len(kept) - 1)
    # A name that is whole is worth more than a further column.
    name_room = needed["parameter"] + max(0, min(widths["parameter"] - needed["parameter"], left))
    left -= name_room - needed["parameter"]
    for name in ("each step", "count", "shape", "parts", "why"):
        if any(texts[name].values()) and needed[name] + GAP <= left:
            kept.append(name)
            left -= needed[name] + GAP
    if "why" in kept and left < widths["each step"] - needed["each step"]:
        texts["each step"] = {
            row: fit(text, MOST_STEP, ellipsis=look.glyphs.ellipsis)
            for row, text in texts["each step"].items()
        }
    numbers = {"count", "shape", "per rank"}
    return [
        _Shown(
            Column(
                name,
                is_number=name in numbers,
                steady_width=name_room if name == "parameter" else 0,
                shrinks_to=least[name] if name in {"each step", "why"} else None,
            ),
            texts[name],
            name,
        )
        for name in COLUMNS
        if name in kept
    ]


def _shape(row: PlannedParameters) -> str:
    return "x".join(map(str, row.shape))


def _notes(plan: TensorPlanTable, width: int, look: Style) -> list[Line]:
    lines = [line for text in _runs(plan) for line in _said(text, width, look)]
    for note in plan.notes:
        lines += sentence(note, width, look, mark=look.sign(look.glyphs.dot), role="warn")
    return lines


def _runs(plan: TensorPlanTable) -> list[str]:
    """Say of each way of running blocks which of them run so."""
    by_backend: dict[str, list[str]] = {}
    for each in plan.blocks:
        name = f"{each.count} blocks like {each.first}" if each.count > 1 else each.first
        by_backend.setdefault(each.backend, []).append(name or "what lies in no block")
    return [
        f"{_BACKENDS.get(backend, backend)}: {', '.join(names)}"
        for backend, names in by_backend.items()
    ]


def _detail(row: PlannedParameters, plan: TensorPlanTable, width: int, look: Style) -> list[Line]:
    """The selected row in full."""
    share = row.rank_bytes / plan.rank_bytes if plan.rank_bytes else 0.0
    kept = f"{units.memory(row.rank_bytes)} of {units.memory(row.whole_bytes)}"
    parts = [
        labelled("shape", f"{_shape(row)}, {units.count(row.count)} of them"),
        labelled("style", " of ".join(filter(None, style_and_parts(row)))),
        labelled("a rank keeps", f"{kept}, {units.percent(100 * share)} of all that it keeps"),
    ]
    lines = [Line(row.pattern, "strong").crop(width), *wrap_facts(parts, width)]
    lines += _said(f"each step: {row.collectives or 'nothing'}", width, look)
    if row.why:
        lines += _said(f"because: {row.why}", width, look)
    return lines


def _said(text: str, width: int, look: Style) -> list[Line]:
    return sentence(text, width, look, role="muted")
