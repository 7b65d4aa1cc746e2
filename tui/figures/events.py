"""What happened, once: the same message from many ranks is one line."""

import msgspec

from boltmesh.telemetry.snapshot import Event

SAME_MOMENT_S = 30.0
"""Ranks reach the same point of a program within this time."""


class EventRow(msgspec.Struct, frozen=True):
    """One event, and the ranks that reported it."""

    time: float
    ranks: tuple[int, ...]
    kind: str
    message: str


def event_rows(events: tuple[Event, ...]) -> list[EventRow]:
    """Return the events in the order of time, those that ranks have in common joined."""
    rows: list[EventRow] = []
    newest: dict[tuple[str, str], int] = {}
    for event in sorted(events, key=lambda event: (event.time, event.rank)):
        key = (event.kind, event.message)
        place = newest.get(key)
        if place is not None:
            row = rows[place]
            if event.rank not in row.ranks and event.time - row.time <= SAME_MOMENT_S:
                rows[place] = msgspec.structs.replace(row, ranks=(*row.ranks, event.rank))
                continue
        newest[key] = len(rows)
        rows.append(EventRow(event.time, (event.rank,), event.kind, event.message))
    return rows
