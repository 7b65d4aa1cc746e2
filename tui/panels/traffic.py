"""Each operator on each axis: what a step moves, how fast, and what it should have moved.

What a step moves, beside what the strategy says that it should move.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from boltmesh.telemetry.snapshot import CollectiveTotal, JobSnapshot, RankSnapshot
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui import units
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.step_time import optimizer_step_seconds
from boltmesh.tui.metrics.verdict import TOLERANCE, Verdict, explain, judge
from boltmesh.tui.metrics.wire import axis_size, is_point_to_point, wire_factor
from boltmesh.tui.render.browse import AS_IT_COMES, browse, selected_row
from boltmesh.tui.render.line import Line, fit
from boltmesh.tui.render.style import Style, heading, labelled, sentence, wrap_facts
from boltmesh.tui.render.table import Cell, Column
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows


class TrafficRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operator on one axis in one optimizer step, the mean over the ranks that count it."""

    axis: str
    operator: str
    num_groups: int
    """Process groups of the axis in which it was seen."""
    num_ranks: int
    """Ranks that count it."""
    calls: float | None
    payload_bytes: float | None
    least: tuple[int, float] | None
    """The rank that moves the fewest bytes, and how many; of equal ones the first."""
    most: tuple[int, float] | None
    seconds: float | None
    """From enqueue to completion, added up over the calls; None where an end is not known."""
    wire_bytes_per_second: float | None
    """Bytes on the wire while the operator runs; None where its end is not known."""
    byte_share: float | None
    """Of all payload of all ranks."""
    time_share: float | None
    """Of the step; more than 1 where calls run beside each other."""
    expected_bytes: float | None
    why: str | None
    """The formula behind ``expected_bytes``."""
    verdict: Verdict
    reason: str | None
    """What a difference most likely comes from."""

    @property
    def ratio(self) -> float | None:
        """Measured over expected."""
        if not self.expected_bytes or self.payload_bytes is None:
            return None
        return self.payload_bytes / self.expected_bytes

    @property
    def is_wrong(self) -> bool:
        """Whether the strategy says otherwise."""
        return self.verdict in {"differs", "missing"}

    @property
    def has_uneven_ranks(self) -> bool:
        """Whether ranks move different amounts."""
        if self.least is None or self.most is None:
            return False
        return self.most[1] - self.least[1] > TOLERANCE * self.most[1]


class AxisTotal(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on one axis in one optimizer step, on a mean rank."""

    axis: str
    calls: float | None
    payload_bytes: float | None
    seconds: float | None
    byte_share: float | None
    time_share: float | None


class _Column:
    """What the ranks say of one operator on one axis, an entry a rank."""

    __slots__ = ("bytes", "calls", "groups", "ranks", "seconds")

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.calls: list[float | None] = []
        self.bytes: list[float | None] = []
        self.seconds: list[float | None] = []
        self.groups: set[str] = set()

    def add(self, rank: int, total: CollectiveTotal) -> None:
        self.groups.add(total.group)
        if self.ranks and self.ranks[-1] == rank:  # in another group of the same axis
            self.calls[-1] = _sum(self.calls[-1], total.calls_per_step)
            self.bytes[-1] = _sum(self.bytes[-1], total.bytes_per_step)
            self.seconds[-1] = _sum(self.seconds[-1], total.seconds_per_step)
            return
        self.ranks.append(rank)
        self.calls.append(total.calls_per_step)
        self.bytes.append(total.bytes_per_step)
        self.seconds.append(total.seconds_per_step)


@remember_last
def traffic_rows(job: JobSnapshot) -> list[TrafficRow]:
    """Return what is measured or expected: the mesh's axes outermost first, then the most bytes.

    Operators that ran only outside of steps, to set up or to save, are no part of a step.
    """
    measured = _operator_columns(job.ranks)
    expected = {(item.axis, item.operator): item for item in job.expected}
    all_bytes = sum(size for column in measured.values() for size in column.bytes if size)
    step_s = optimizer_step_seconds(job)
    rows = [
        _row(key, measured.get(key), expected.get(key), job, all_bytes=all_bytes, step_s=step_s)
        for key in {**expected, **measured}
    ]
    rows = [row for row in rows if row.calls != 0 or row.expected_bytes]
    axes = [*job.mesh, "world"]
    return sorted(
        rows,
        key=lambda row: (
            axes.index(row.axis) if row.axis in axes else len(axes),
            -max(row.payload_bytes or 0, row.expected_bytes or 0),
            row.operator,
        ),
    )


def axis_totals(rows: Sequence[TrafficRow], *, num_ranks: int) -> list[AxisTotal]:
    """Return the sums of the axes that have several operators, and of all axes, if there are more.

    A row is the mean of the ranks that count it, which need not be all; the sum is that of a mean
    rank of the job. What is not known of one operator is not known of the axis.

    Args:
        rows: Of the job.
        num_ranks: The ranks that tell what they move: those of other hosts do not.
    """
    counted = [row for row in rows if row.num_ranks]
    axes = list(dict.fromkeys(row.axis for row in counted))
    totals = [
        _axis_total(axis, members, num_ranks)
        for axis in axes
        if len(members := [row for row in counted if row.axis == axis]) > 1
    ]
    if len(axes) > 1:
        totals.append(_axis_total("all axes", counted, num_ranks))
    return totals


def _axis_total(axis: str, rows: Sequence[TrafficRow], num_ranks: int) -> AxisTotal:
    def total(values: Iterable[float | None]) -> float | None:
        shares = [row.num_ranks / max(num_ranks, row.num_ranks) for row in rows]
        return _total(zip(values, shares, strict=True))

    return AxisTotal(
        axis=axis,
        calls=total(row.calls for row in rows),
        payload_bytes=total(row.payload_bytes for row in rows),
        seconds=total(row.seconds for row in rows),
        byte_share=_total((row.byte_share, 1.0) for row in rows),
        time_share=total(row.time_share for row in rows),
    )


def _operator_columns(ranks: Iterable[RankSnapshot]) -> Mapping[tuple[str, str], _Column]:
    columns: dict[tuple[str, str], _Column] = {}
    for rank in ranks:
        for total in rank.collectives:
            key = (total.axis, total.operator)
            column = columns.get(key)
            if column is None:
                column = columns[key] = _Column()
            column.add(rank.rank, total)
    return columns


def _row(
    key: tuple[str, str],
    column: _Column | None,
    expected: ExpectedTraffic | None,
    job: JobSnapshot,
    *,
    all_bytes: float,
    step_s: float | None,
) -> TrafficRow:
    axis, operator = key
    column = column or _Column()
    sizes = [
        (size, rank)
        for rank, size in zip(column.ranks, column.bytes, strict=True)
        if size is not None
    ]
    payload, seconds = _mean(column.bytes), _mean(column.seconds)
    verdict = judge(payload, expected, job, is_seen=bool(column.ranks))
    least = min(sizes, default=None)
    most = max(sizes, key=lambda item: (item[0], -item[1]), default=None)
    return TrafficRow(
        axis=axis,
        operator=operator,
        num_groups=len(column.groups),
        num_ranks=len(column.ranks),
        calls=_mean(column.calls),
        payload_bytes=payload,
        least=None if least is None else (least[1], least[0]),
        most=None if most is None else (most[1], most[0]),
        seconds=seconds,
        wire_bytes_per_second=_wire_speed(column, operator, axis_size(job, axis)),
        byte_share=sum(size for size, _ in sizes) / all_bytes if sizes and all_bytes else None,
        time_share=seconds / step_s if seconds is not None and step_s else None,
        expected_bytes=None if expected is None else expected.payload_bytes,
        why=None if expected is None else expected.why,
        verdict=verdict,
        reason=explain(verdict, payload, expected, _mean(column.calls), job),
    )


def _wire_speed(column: _Column, operator: str, size: int | None) -> float | None:
    if is_point_to_point(operator):
        size = 2
    if size is None:
        return None
    pairs = [
        (moved, seconds)
        for moved, seconds in zip(column.bytes, column.seconds, strict=True)
        if moved and seconds
    ]
    seconds = sum(seconds for _, seconds in pairs)
    moved = sum(moved for moved, _ in pairs)
    return moved * wire_factor(operator, size) / seconds if seconds else None


def _sum(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left + right


def _total(parts: Iterable[tuple[float | None, float]]) -> float | None:
    total = 0.0
    for value, weight in parts:
        if value is None:
            return None
        total += value * weight
    return total


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


COLUMNS = (
    "axis",
    "operator",
    "groups",
    "calls",
    "payload",
    "ranks",
    "wire",
    "of bytes",
    "of step",
    "expected",
    "difference",
    "because",
)
"""Titles that the table can be sorted by."""

MAX_DIFFERENCES = 4
"""Sentences under the table; the others stand in it all the same."""

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
        if not shown:
            lines.append(Line("no operator fits the filter", "muted").crop(width))
    if look.has_headings:
        lines.insert(0, heading("communication per step", width, look, right=hidden))
    return [*lines[:top], *notes, *lines[top:], *words][:height]


def shown_traffic(state: State, table: TableView) -> list[TrafficRow]:
    """Return the filtered and sorted rows."""
    return arrange_rows(traffic_rows(state.job), cells_of, table)


def cells_of(row: TrafficRow) -> Cells:
    """Return a row as it is filtered and sorted."""
    return {
        "axis": row.axis,
        "operator": row.operator,
        "groups": row.num_groups,
        "calls": row.calls,
        "payload": row.payload_bytes,
        "ranks": row.num_ranks,
        "wire": row.wire_bytes_per_second,
        "of bytes": row.byte_share,
        "of step": row.time_share,
        "expected": row.expected_bytes,
        "difference": difference_words(row),
        "because": row.reason if row.is_wrong else row.why,
    }


def difference_words(row: TrafficRow) -> str:
    """Return the verdict on a row in a word or two."""
    if row.verdict == "differs":
        return "unexpected" if row.ratio is None else f"{row.ratio:.3g}x"
    return {
        "equal": "equal",
        "missing": "never seen",
        "pending": "counting",
        "unstated": "not stated",
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
    speed = row.wire_bytes_per_second
    return units.UNKNOWN if speed is None else f"{units.traffic(speed)}/s"


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
    """Return what is said where there is no row."""
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
        Column("operator", shrinks_to=9),
        *([Column("groups", is_number=True, rank=8)] if has_groups else []),
        Column("calls", is_number=True, rank=3),
        Column("payload", is_number=True, rank=1),
        Column("ranks", rank=7),
        *([Column("wire", is_number=True, rank=4)] if has_time else []),
        Column("of bytes", is_number=True, rank=6),
        *([Column("of step", is_number=True, rank=5)] if has_time else []),
        Column("expected", is_number=True, rank=2),
        Column("difference"),
        Column("because", rank=9, shrinks_to=14),
    ]


def _cells(row: TrafficRow, rows: Sequence[TrafficRow], look: Style) -> list[Cell]:
    has_time = any(each.seconds is not None for each in rows)
    has_groups = any(each.num_groups > 1 for each in rows)
    return [
        row.axis,
        row.operator.strip("_"),
        *([units.count(row.num_groups or None)] if has_groups else []),
        _calls(row.calls),
        units.traffic(row.payload_bytes),
        _spread(row),
        *([wire_speed(row)] if has_time else []),
        _share(row.byte_share),
        *([_share(row.time_share)] if has_time else []),
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
        _share(total.byte_share),
        *([_share(total.time_share)] if has_time else []),
        "",
        "",
        "",
    ]
    return [Line(cell, "strong") for cell in cells]


def _calls(calls: float | None) -> str:
    return units.count(None if calls is None else round(calls, 1))


def _share(share: float | None) -> str:
    if share is None:
        return units.UNKNOWN
    return "<1%" if 0 < share < 0.005 else units.percent(100 * share)


def _spread(row: TrafficRow) -> Line:
    """Say which ranks the mean is of, and how far apart they are where they are."""
    if row.has_uneven_ranks and row.least is not None and row.most is not None:
        return Line(f"{units.traffic(row.least[1])} to {units.traffic(row.most[1])}", "warn")
    return Line(units.count(row.num_ranks), "muted")


def _words(
    shown: Sequence[TrafficRow], table: TableView, state: State, width: int, look: Style
) -> list[Line]:
    chosen = selected_row(shown, table)
    if chosen is not None:
        return _detail(chosen, state, width, look)
    wrong = [row for row in shown if row.is_wrong]
    mark = look.sign(look.glyphs.differs)
    return [
        line
        for row in wrong[:MAX_DIFFERENCES]
        for line in sentence(_claim(row), width, look, mark=mark, role="bad")
    ]


def _claim(row: TrafficRow) -> str:
    name = f"{row.axis} {row.operator.strip('_')}"
    if row.verdict == "missing":
        return f"{name} should move {units.traffic(row.expected_bytes)} a step: {row.reason}"
    if row.ratio is None:
        return f"{name} moves {units.traffic(row.payload_bytes)} a step: {row.reason}"
    return f"{name} moves {row.ratio:.3g}x the expected bytes: {row.reason}"


def _detail(row: TrafficRow, state: State, width: int, look: Style) -> list[Line]:
    """The selected row in full."""
    name = f"{row.axis} {row.operator.strip('_')}"
    parts = [
        Line(name, "strong"),
        labelled("measured", f"{units.traffic(row.payload_bytes)} in {_calls(row.calls)} calls"),
        labelled("expected", units.traffic(row.expected_bytes))
        .add("  ")
        .join(difference(row, look)),
        labelled("takes", units.seconds(row.seconds)),
        labelled("wire", wire_speed(row)),
        labelled("counted by", f"{row.num_ranks} of {state.job.world_size} ranks"),
    ]
    if row.least is not None and row.most is not None and row.has_uneven_ranks:
        parts.append(labelled("least", f"{units.traffic(row.least[1])} on rank {row.least[0]}"))
        parts.append(labelled("most", f"{units.traffic(row.most[1])} on rank {row.most[0]}"))
    lines = [Line(), *wrap_facts(parts, width)]
    for label, text in (("formula", row.why), ("because", row.reason)):
        if text:
            lines += sentence(f"{label}: {text}", width, look, role="muted")
    return lines
