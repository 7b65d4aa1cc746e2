"""All events, the newest first: what the ranks told, and what can be seen from outside."""

import time

from boltmesh.tui import units
from boltmesh.tui.drawing.browse import AS_IT_COMES, browse, selected_row
from boltmesh.tui.drawing.line import Line, Role
from boltmesh.tui.drawing.look import Look, heading
from boltmesh.tui.drawing.table import Cell, Column
from boltmesh.tui.drawing.words import sentence
from boltmesh.tui.figures.events import EventRow, timeline
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

COLUMNS = ("time", "ranks", "kind", "message")
"""Titles that the table can be sorted by."""

MAX_MESSAGE_LINES = 6
_ROOM_FOR_A_MESSAGE = 8
"""From this height on the selected event is also told in full."""

KIND_ROLES: dict[str, Role] = {
    "warning": "warn",
    "alert": "warn",
    "slow step": "warn",
    "hang": "bad",
    "stopped": "bad",
    "error": "bad",
    "end": "strong",
}


def draw_event_table(
    state: State, width: int, height: int, look: Look, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """A line for each event, and the selected one in full."""
    rows = shown_events(state, table)
    if not timeline(state):
        top = [heading("events", width, look)] if look.has_headings else []
        return [*top, Line("no events yet", "muted").crop(width)][:height]
    room = height - int(look.has_headings) - 1
    chosen = selected_row(rows, table)
    words: list[Line] = []
    if chosen is not None and height >= _ROOM_FOR_A_MESSAGE:
        words = [Line(), *_in_full(chosen, state, width, look)]
    seen = browse(
        _COLUMNS,
        rows,
        lambda row: _cells(row, state),
        width,
        room - len(words),
        look,
        table,
    )
    nothing = [] if rows else [Line("no event fits the filter", "muted").crop(width)]
    top = [heading("events", width, look, right=seen.hidden)] if look.has_headings else []
    return [*top, seen.header, *seen.lines, *nothing, *words][:height]


def shown_events(state: State, table: TableView) -> list[EventRow]:
    """Return the filtered and sorted rows."""
    return arrange_rows(timeline(state)[::-1], lambda row: _cells_of(row, state), table)


def who(ranks: tuple[int, ...], world_size: int) -> str:
    """Name the ranks of an event; one of no rank in particular is about the job."""
    if not ranks:
        return "the job"
    return "all ranks" if len(ranks) == world_size > 1 else units.ranks(ranks, most=2)


def clock(moment: float, now: float) -> str:
    """Return the time of day, with the date where that is not today's."""
    try:
        at, today = time.localtime(moment), time.localtime(now)
    except (OverflowError, ValueError, OSError):  # no moment that a calendar knows
        return units.UNKNOWN
    is_today = (at.tm_year, at.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if is_today else "%b %d %H:%M", at)


_COLUMNS = (
    Column("time"),
    Column("ranks", rank=1, steady_width=9),
    Column("kind", steady_width=10),
    Column("message", shrinks_to=7),
)


def _cells_of(row: EventRow, state: State) -> Cells:
    return {
        "time": row.time,
        "ranks": min(row.ranks, default=None),
        "kind": row.kind,
        "message": row.message,
        # To be found by what is on the screen.
        "clock": clock(row.time, state.time),
        "who": who(row.ranks, state.job.world_size),
    }


def _cells(row: EventRow, state: State) -> list[Cell]:
    role = KIND_ROLES.get(row.kind, "muted")
    return [
        Line(clock(row.time, state.time), "muted"),
        Line(who(row.ranks, state.job.world_size), "muted"),
        Line(row.kind, role),
        row.message,
    ]


def _in_full(row: EventRow, state: State, width: int, look: Look) -> list[Line]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.time))
    names = units.ranks(row.ranks, most=12) if row.ranks else "the job"
    title = Line(when, "strong").add(f"  {names}  ", "muted")
    title.add(row.kind, KIND_ROLES.get(row.kind, "muted"))
    return [
        title.crop(width),
        *sentence(row.message, width, look, max_lines=MAX_MESSAGE_LINES),
    ]
