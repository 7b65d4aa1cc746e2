"""Communication per step: each operator on each axis, measured beside expected.

``draw_traffic`` is the full table, ``draw_communication`` and ``draw_axis`` are its short forms.
"""

from collections.abc import Sequence

from boltmesh.telemetry.snapshot import operator_name
from boltmesh.tui import units
from boltmesh.tui.metrics.traffic import AxisTotal, TrafficRow, axis_totals, traffic_rows
from boltmesh.tui.render.line import Line, fit
from boltmesh.tui.render.style import Style, facts, heading, labelled, sentence, wrap_facts
from boltmesh.tui.render.table import AS_IT_COMES, Cell, Column, browse, draw_table, selected_row
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

COLUMNS = (
    "axis",
    "operator",
    "groups",
    "calls",
    "payload",
    "ranks",
    "busbw",
    "share of bytes",
    "share of step",
    "expected",
    "difference",
    "formula",
)
"""Titles that the table can be sorted by."""

MAX_DIFFERENCES = 4
"""Sentences under the table; the others are still in the table."""

LEAST_TABLE = 2
"""Titles and a row; in a single line the largest operators are named instead."""

ROWS_BEFORE_TOTALS = 3
"""Where fewer lines are left for the operators themselves, their sums are left out."""


def draw_traffic(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """The table, the sum of each axis, and the selected row or the differences in words."""
    rows = traffic_rows(state.job)
    shown = shown_traffic(state, table)
    notes = _notes(state, rows, width, look)
    words = _words(shown, table, state, width, look)
    top = int(look.has_headings)
    # Words give way before rows do.
    room = height - top - len(notes) - 1
    words = words[: max(0, room - min(len(shown), ROWS_BEFORE_TOTALS))]
    telling = sum(bool(rank.collectives) for rank in state.job.ranks)
    totals = [] if table.filter else axis_totals(rows, num_ranks=telling)
    if room - len(words) - len(totals) < min(len(shown), ROWS_BEFORE_TOTALS):
        totals = []
    lines: list[Line] = []
    hidden = Line()
    if rows:
        seen = browse(
            _columns(rows),
            shown,
            lambda row: _cells(row, rows, look),
            width,
            room - len(words),
            look,
            table,
            totals=[_total_cells(total, rows) for total in totals],
        )
        hidden = seen.hidden
        lines = [seen.header, *seen.lines]
    if look.has_headings:
        lines.insert(0, heading("communication per step", width, look, right=hidden))
    return [*lines[:top], *notes, *lines[top:], *words][:height]


def shown_traffic(state: State, table: TableView) -> list[TrafficRow]:
    """Return the filtered and sorted rows; where no column sorts, the most bytes come first."""
    rows = sorted(traffic_rows(state.job), key=_bytes, reverse=True)
    return arrange_rows(rows, cells_of, table)


def cells_of(row: TrafficRow) -> Cells:
    """Return a row as it is filtered and sorted."""
    return {
        "axis": row.axis,
        "operator": row.operator,
        "groups": row.num_groups,
        "calls": row.calls,
        "payload": row.payload_bytes,
        "ranks": row.num_ranks,
        "busbw": row.wire_bytes_per_second,
        "share of bytes": row.byte_share,
        "share of step": row.time_share,
        "expected": row.expected_bytes,
        "difference": difference_words(row),
        "formula": row.reason if row.is_wrong else row.why,
    }


def difference_words(row: TrafficRow) -> str:
    """Return the verdict on a row in a word or two."""
    if row.verdict in {"differs", "varies"}:
        return "unexpected" if row.ratio is None else f"{row.ratio:.3g}x"
    return {
        "equal": "as expected",
        "missing": "never seen",
        "pending": "counting",
        "unstated": "no formula",
    }[row.verdict]


def difference(row: TrafficRow, look: Style) -> Line:
    """The verdict on a row as a sign and a word."""
    words = difference_words(row)
    if row.verdict == "equal":
        return Line(look.sign(look.glyphs.equal) + words, "good")
    if row.is_wrong:
        return Line(look.sign(look.glyphs.differs) + words, "bad")
    return Line(words, "muted")


def wire_speed(row: TrafficRow) -> str:
    """Bytes a second on the wire while the operator runs."""
    return units.bandwidth(row.wire_bytes_per_second)


def uncounted_note(state: State, width: int, look: Style) -> Line | None:
    """Say why communication is not counted, where it is not."""
    note = state.job.communication_note
    if note is None:
        return None
    # The writer's own sentence may begin with the same words.
    said = note.removeprefix("communication is not counted: ")
    text = f"communication is not counted: {said}"
    return Line(fit(text, width, ellipsis=look.glyphs.ellipsis), "warn")


def nothing_sent(state: State) -> str:
    """Return the text for a table without rows."""
    return "one rank, nothing to send" if state.job.world_size == 1 else "nothing sent yet"


def _notes(state: State, rows: Sequence[TrafficRow], width: int, look: Style) -> list[Line]:
    note = uncounted_note(state, width, look)
    if note is not None:
        return [note]
    return [] if rows else [Line(nothing_sent(state), "muted").crop(width)]


def _columns(rows: Sequence[TrafficRow]) -> list[Column]:
    # A column of nothing is left out: few backends tell when an operator ended.
    has_time = any(row.seconds is not None for row in rows)
    has_groups = any(row.num_groups > 1 for row in rows)
    return [
        Column("axis"),
        Column("operator", shrinks_to=10),
        *([Column("groups", is_number=True, rank=8)] if has_groups else []),
        Column("calls", is_number=True, rank=3),
        Column("payload", is_number=True, rank=1),
        Column("ranks", rank=7),
        *([Column("busbw", is_number=True, rank=4)] if has_time else []),
        Column("share of bytes", is_number=True, rank=6),
        *([Column("share of step", is_number=True, rank=5)] if has_time else []),
        Column("expected", is_number=True, rank=2),
        Column("difference"),
        Column("formula", rank=9, shrinks_to=14),
    ]


def _cells(row: TrafficRow, rows: Sequence[TrafficRow], look: Style) -> list[Cell]:
    has_time = any(each.seconds is not None for each in rows)
    has_groups = any(each.num_groups > 1 for each in rows)
    return [
        row.axis,
        operator_name(row.operator),
        *([units.count(row.num_groups or None)] if has_groups else []),
        _calls(row.calls),
        units.traffic(row.payload_bytes),
        _spread(row),
        *([wire_speed(row)] if has_time else []),
        units.whole_share(row.byte_share),
        *([units.whole_share(row.time_share)] if has_time else []),
        Line(units.traffic(row.expected_bytes), "muted"),
        difference(row, look),
        Line((row.reason if row.is_wrong else row.why) or "", "muted"),
    ]


def _total_cells(total: AxisTotal, rows: Sequence[TrafficRow]) -> list[Cell]:
    has_time = any(each.seconds is not None for each in rows)
    has_groups = any(each.num_groups > 1 for each in rows)
    cells = [
        total.axis,
        "all",
        *([""] if has_groups else []),
        _calls(total.calls),
        units.traffic(total.payload_bytes),
        "",
        *([""] if has_time else []),
        units.whole_share(total.byte_share),
        *([units.whole_share(total.time_share)] if has_time else []),
        "",
        "",
        "",
    ]
    return [Line(cell, "strong") for cell in cells]


def _calls(calls: float | None) -> str:
    return units.count(None if calls is None else round(calls, 1))


def _spread(row: TrafficRow) -> Line:
    """Say which ranks the mean is of, and how far apart they are where they are."""
    if row.has_uneven_ranks and row.least is not None and row.most is not None:
        spread = f"{units.traffic(row.least[1])} to {units.traffic(row.most[1])}"
        is_planned = row.verdict == "equal"  # stages of unequal size, for example
        return Line(f"{units.count(row.num_ranks)}, {spread}", "muted" if is_planned else "warn")
    return Line(units.count(row.num_ranks), "muted")


def _words(
    shown: Sequence[TrafficRow], table: TableView, state: State, width: int, look: Style
) -> list[Line]:
    chosen = selected_row(shown, table)
    detail = [] if chosen is None else _detail(chosen, state, width, look)
    # The detail has the reason of its own row.
    wrong = [row for row in shown if row.is_wrong and row is not chosen]
    mark = look.sign(look.glyphs.differs)
    return detail + [
        line
        for row in wrong[:MAX_DIFFERENCES]
        for line in sentence(_claim(row), width, look, mark=mark, role="bad")
    ]


def _claim(row: TrafficRow) -> str:
    name = f"{row.axis} {operator_name(row.operator)}"
    if row.verdict == "missing":
        return f"{name} should move {units.traffic(row.expected_bytes)} a step: {row.reason}"
    if row.ratio is None:
        return f"{name} moves {units.traffic(row.payload_bytes)} a step: {row.reason}"
    return f"{name} moves {row.ratio:.3g}x the expected bytes: {row.reason}"


def _detail(row: TrafficRow, state: State, width: int, look: Style) -> list[Line]:
    """The selected row in full."""
    name = f"{row.axis} {operator_name(row.operator)}"
    parts = [
        Line(name, "strong"),
        labelled("measured", f"{units.traffic(row.payload_bytes)} in {_calls(row.calls)} calls"),
        labelled("expected", units.traffic(row.expected_bytes))
        .add("  ")
        .join(difference(row, look)),
        labelled("takes", units.seconds(row.seconds)),
        labelled("busbw", wire_speed(row)),
        labelled("counted by", f"{row.num_ranks} of {state.job.world_size} ranks"),
    ]
    if row.least is not None and row.most is not None and row.has_uneven_ranks:
        parts.append(labelled("min", f"{units.traffic(row.least[1])} on rank {row.least[0]}"))
        parts.append(labelled("max", f"{units.traffic(row.most[1])} on rank {row.most[0]}"))
    lines = [Line(), *wrap_facts(parts, width)]
    for label, text in (("formula", row.why), ("because", row.reason)):
        if text:
            lines += sentence(f"{label}: {text}", width, look, role="muted")
    return lines


def draw_communication(state: State, width: int, height: int, look: Style) -> list[Line]:
    """A line for each operator on each axis, the most bytes first; wrong ones are marked.

    Where the table has no room for a row of figures, one line names the largest.
    """
    rows = sorted(traffic_rows(state.job), key=_bytes, reverse=True)
    total = sum(row.payload_bytes or 0.0 for row in rows)
    right = Line(f"{units.traffic(total)} a rank", "muted") if total else Line()
    lines = []
    if look.has_headings:
        lines.append(heading("communication per step", width, look, right=right))
    note = uncounted_note(state, width, look)
    if note is not None:
        lines.append(note)
    elif not rows:
        prefix = "" if look.has_headings else "communication: "
        lines.append(Line(prefix + nothing_sent(state), "muted").crop(width))
    if rows and height - len(lines) < LEAST_TABLE:
        lines.append(_largest(rows, width, look))
    elif rows:
        lines += communication_table(rows, width, look)
    return lines[:height]


def _largest(rows: Sequence[TrafficRow], width: int, look: Style) -> Line:
    """As many operators as fit into a line, each with its bytes; wrong ones are marked."""
    parts = []
    for row in rows:
        name = f"{row.axis} {operator_name(row.operator)} "
        part = Line(name, "muted").add(units.traffic(row.payload_bytes), "strong")
        if row.is_wrong:
            part.add(" ").join(difference(row, look))
        parts.append(part)
    return facts(parts, width)


def _bytes(row: TrafficRow) -> float:
    return max(row.payload_bytes or 0.0, row.expected_bytes or 0.0)


def draw_axis(state: State, width: int, height: int, look: Style, *, axis: str) -> list[Line]:
    """The same of one axis alone."""
    lines = [heading(f"{axis} axis, per step", width, look)] if look.has_headings else []
    rows = [row for row in traffic_rows(state.job) if row.axis == axis]
    return [*lines, *communication_table(rows, width, look)][: max(0, height)]


def communication_table(rows: list[TrafficRow], width: int, look: Style) -> list[Line]:
    """A header and a line for each row."""
    # Few backends tell when an operator ended; a column of nothing is left out.
    has_speed = any(row.wire_bytes_per_second is not None for row in rows)
    columns = [
        Column("axis"),
        Column("operator", shrinks_to=10),
        Column("calls", is_number=True, rank=2),
        Column("payload", is_number=True),
        *([Column("busbw", is_number=True, rank=3)] if has_speed else []),
        Column("expected", is_number=True, rank=1),
        Column(""),
        Column("formula", rank=4, shrinks_to=12),
    ]
    cells: list[list[Cell]] = [
        [
            row.axis,
            operator_name(row.operator),
            units.count(None if row.calls is None else round(row.calls, 1)),
            units.traffic(row.payload_bytes),
            *([wire_speed(row)] if has_speed else []),
            Line(units.traffic(row.expected_bytes), "muted"),
            difference(row, look),
            Line((row.reason if row.is_wrong else row.why) or "", "muted"),
        ]
        for row in rows
    ]
    return draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
