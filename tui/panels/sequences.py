"""How far every rank is in each process group, and the ranks missing from a stuck one."""

from collections.abc import Sequence

from boltmesh.telemetry.snapshot import operator_name
from boltmesh.tui import units
from boltmesh.tui.metrics.hangs import (
    first_to_go,
    hangs,
    is_named,
    last_collective,
    plural,
    waits,
    whereabouts,
)
from boltmesh.tui.metrics.sequences import GroupRow, Status, group_rows, has_ended
from boltmesh.tui.panels.traffic import uncounted_note
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.style import Style, heading, sentence
from boltmesh.tui.render.table import AS_IT_COMES, Cell, Column, browse, selected_row
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

COLUMNS = ("axis", "ranks", "size", "number", "operator", "missing", "advanced", "state")
"""Titles that the table can be sorted by."""

MAX_HANGS = 3
"""Sentences above the table; the other groups stand in it."""

MAX_NUMBERS = 8
"""Lines under the table, one for each number that ranks of the selected group are at."""

STATE_WORDS: dict[Status, str] = {
    "even": "in sync",
    "apart": "apart",
    "waiting": "waiting",
    "stuck": "stuck",
    "paired": "point to point",
    "unknown": "not known",
}


def draw_sequences(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """The stuck groups in words, a line for each group, and the ranks of the selected one."""
    every, rows = group_rows(state), shown_groups(state, table)
    top = [heading("collectives by group", width, look)] if look.has_headings else []
    words = _words(state, width, look)
    if not every:
        return [*top, *words][:height]
    room = height - len(top) - 1
    words = words[: max(1, room - 2)]
    detail = _detail(rows, table, state, width, look)
    detail = detail[: max(0, room - len(words) - min(len(rows), 4))]
    seen = browse(
        _columns(every),
        rows,
        lambda row: _cells(row, every, state, look),
        width,
        room - len(words) - len(detail),
        look,
        table,
    )
    if top:
        top = [heading("collectives by group", width, look, right=seen.hidden)]
    return [*top, *words, seen.header, *seen.lines, *detail][:height]


def shown_groups(state: State, table: TableView) -> list[GroupRow]:
    """Return the filtered and sorted rows."""
    # The group in which a hang began precedes those that it blocks.
    stuck = {id(hang.row): place for place, hang in enumerate(hangs(state))}
    rows = sorted(group_rows(state), key=lambda row: stuck.get(id(row), len(stuck)))
    return arrange_rows(rows, cells_of, table)


def cells_of(row: GroupRow) -> Cells:
    """Return a row as it is filtered and sorted."""
    return {
        "axis": row.axis,
        "ranks": units.ranks(row.members),
        "size": len(row.members),
        "number": row.newest,
        "operator": row.operator,
        "missing": len(row.missing),
        "advanced": row.silent_s,
        "state": STATE_WORDS[row.status],
    }


def _columns(rows: Sequence[GroupRow]) -> list[Column]:
    return [
        Column("axis"),
        Column("ranks", rank=2, shrinks_to=9),
        Column("size", is_number=True, rank=6),
        Column("number", is_number=True, rank=1),
        Column("operator", rank=4, shrinks_to=10),
        # Only while a rank waits: for a moment ranks are missing in every job.
        *([Column("missing", rank=3, shrinks_to=9)] if _has_missing(rows) else []),
        Column("advanced", is_number=True, rank=5, steady_width=8),
        Column("state"),
    ]


def _has_missing(rows: Sequence[GroupRow]) -> bool:
    return any(row.missing and row.status in {"stuck", "waiting"} for row in rows)


def _cells(row: GroupRow, rows: Sequence[GroupRow], state: State, look: Style) -> list[Cell]:
    missing: Role = "bad" if row.status == "stuck" else "muted"
    ago = "" if row.silent_s is None else " earlier" if has_ended(state.job) else " ago"
    return [
        row.axis,
        _numbered(row.members),
        units.count(len(row.members)),
        _numbers(row),
        operator_name(row.operator) if row.operator else units.UNKNOWN,
        *([Line(_numbered(row.missing), missing)] if _has_missing(rows) else []),
        Line(units.duration(row.silent_s) + ago, "muted"),
        _state(row.status, look),
    ]


def _numbered(ranks: Sequence[int]) -> str:
    """Name ranks in a column whose title says that they are ranks."""
    return units.ranks(ranks).removeprefix("ranks ").removeprefix("rank ") if ranks else ""


def _numbers(row: GroupRow) -> str:
    """``#1,841``, or from the lowest to the highest where the ranks differ."""
    if row.newest is None:
        return units.UNKNOWN
    if row.oldest == row.newest:
        return f"#{row.newest:,}"
    return f"#{row.oldest:,}-{row.newest:,}"


def _state(status: Status, look: Style) -> Line:
    glyphs = look.glyphs
    signs: dict[Status, tuple[str, Role]] = {
        "even": (glyphs.equal, "good"),
        "apart": (glyphs.running, "muted"),
        "waiting": ("!", "warn"),
        "stuck": (glyphs.failed, "bad"),
        "paired": (glyphs.running, "muted"),
        "unknown": (glyphs.absent, "muted"),
    }
    sign, role = signs[status]
    return Line(look.sign(sign) + STATE_WORDS[status], role)


def _words(state: State, width: int, look: Style) -> list[Line]:
    """The rank that failed first, and the stuck groups; or that there are none."""
    lines = _first_words(state, width, look)
    note = uncounted_note(state, width, look)
    found = hangs(state)
    if note is not None:
        lines.append(note)
    elif not group_rows(state):
        lines.append(Line("no collective yet", "muted").crop(width))
    elif not found and not lines and not waits(state) and not has_ended(state.job):
        ok = look.sign(look.glyphs.equal) + "no collective waits for a rank"
        lines.append(Line(ok, "good").crop(width))
    for wait in waits(state)[:1] if not found else ():
        lines += sentence(wait.text, width, look, mark=look.sign("!"), role="warn")
    mark = look.sign(look.glyphs.failed)
    for hang in found[:MAX_HANGS]:
        role: Role = "bad" if hang.is_first else "warn"
        lines += sentence(hang.text, width, look, mark=mark, role=role)
    if len(found) > MAX_HANGS:
        rest = f"and {len(found) - MAX_HANGS} more groups are stuck"
        lines += sentence(rest, width, look, role="warn")
    return lines


def _first_words(state: State, width: int, look: Style) -> list[Line]:
    first = first_to_go(state.job)
    if first is None:
        return []
    text = state.job.cause or f"rank {first.rank} went first: it {whereabouts(first, state)}"
    lines = sentence(text, width, look, mark=look.sign(look.glyphs.failed), role="bad")
    where = last_collective(first, state)
    if where is not None:
        who = f"rank {first.rank}" + ("" if is_named(first, text) else " fell silent first")
        lines += sentence(f"{who}: {where}", width, look, role="muted")
    return lines


def _detail(
    rows: Sequence[GroupRow], table: TableView, state: State, width: int, look: Style
) -> list[Line]:
    """The ranks of the selected group, or of the first that is stuck, by their numbers."""
    row = selected_row(rows, table) or next((row for row in rows if row.status == "stuck"), None)
    if row is None:
        return []
    by_number: dict[tuple[int, str, str], list[int]] = {}
    ranks = {rank.rank: rank for rank in state.job.ranks}
    for number, each in row.progress.items():
        place = whereabouts(ranks.get(number), state)
        if number in row.waiting:
            place = "had entered it" if has_ended(state.job) else "waits in it"
        key = (each.sequence, operator_name(each.operator or ""), place)
        by_number.setdefault(key, []).append(number)
    ordered = sorted(by_number.items(), key=lambda item: (item[0][0], len(item[1])))
    name = f"{row.axis}, {units.ranks(row.members)}"
    lines = [Line(), Line(name, "strong").add(f"  group {row.group}", "muted").crop(width)]
    for (sequence, operator, place), numbers in ordered[:MAX_NUMBERS]:
        line = Line(f"#{sequence:,} {operator}".ljust(18))
        where = place if len(numbers) == 1 else plural(place)
        line.add(f" {units.ranks(numbers)}", "strong").add(f" {where}", "muted")
        lines.append(line.crop(width))
    if len(ordered) > MAX_NUMBERS:
        rest = sum(len(numbers) for _, numbers in ordered[MAX_NUMBERS:])
        lines.append(Line(f"and {rest} ranks at other numbers or places", "muted").crop(width))
    if row.unseen:
        unseen = f"{units.ranks(row.unseen)}: cannot be seen from here"
        lines.append(Line(unseen, "muted").crop(width))
    return lines
