"""What happened, once: the same message from many ranks is one line."""

from collections.abc import Iterable

import msgspec

from boltmesh.telemetry.snapshot import Event, JobSnapshot, RankSnapshot
from boltmesh.tui import units
from boltmesh.tui.figures.hangs import hangs, whereabouts
from boltmesh.tui.figures.memo import remember_last
from boltmesh.tui.figures.sequences import has_ended
from boltmesh.tui.figures.slow_steps import SlowStep, slow_steps
from boltmesh.tui.state import State

SAME_MOMENT_S = 30.0
"""Ranks reach the same point of a program within this time."""

STARTS_WITHIN_S = 60.0
"""A running job's rank that nothing is known of is no event before: its file comes with it."""

MAX_HANGS = 8
"""Groups that stand among the events; in a large mesh one missing rank holds up most of them."""

_ALERTS = ("alert: ", "alert is over: ")
"""What the messages of the watcher's alerts begin with."""


class EventRow(msgspec.Struct, frozen=True):
    """One event, and the ranks that reported it."""

    time: float
    ranks: tuple[int, ...]
    """Empty where it is about no rank in particular."""
    kind: str
    """That of the Event; or ``alert``, ``hang``, ``slow step``, ``stopped``."""
    message: str


@remember_last
def timeline(state: State) -> tuple[EventRow, ...]:
    """Return what the ranks told and what can be seen from outside, oldest first."""
    job = state.job
    told = [_told(event) for event in job.events]
    slow = [_slow(step) for step in slow_steps(job)]
    stuck = [
        EventRow(hang.since or state.time, hang.row.missing, "hang", hang.text)
        for hang in hangs(state)[:MAX_HANGS]
    ]
    return tuple(_fold([*told, *slow, *_stopped(job, state), *stuck]))


def event_rows(events: Iterable[Event]) -> list[EventRow]:
    """Return the events in the order of time, those that ranks have in common joined."""
    return _fold(_told(event) for event in events)


def _fold(rows: Iterable[EventRow]) -> list[EventRow]:
    folded: list[tuple[EventRow, dict[int, None]]] = []
    newest: dict[tuple[str, str], int] = {}
    for row in sorted(rows, key=lambda row: (row.time, row.ranks)):
        key = (row.kind, row.message)
        place = newest.get(key)
        if place is not None:
            first, ranks = folded[place]
            is_other = bool(row.ranks) and ranks.keys().isdisjoint(row.ranks)
            if is_other and row.time - first.time <= SAME_MOMENT_S:
                ranks.update(dict.fromkeys(row.ranks))
                continue
        newest[key] = len(folded)
        folded.append((row, dict.fromkeys(row.ranks)))
    return [msgspec.structs.replace(row, ranks=tuple(ranks)) for row, ranks in folded]


def _told(event: Event) -> EventRow:
    ranks = (event.rank,) if event.rank >= 0 else ()
    if event.kind == "warning" and event.message.startswith(_ALERTS):
        # The watcher puts its alerts among the job's events, with these words before them.
        return EventRow(event.time, ranks, "alert", event.message.removeprefix(_ALERTS[0]))
    return EventRow(event.time, ranks, event.kind, event.message)


def _slow(step: SlowStep) -> EventRow:
    message = (
        f"step {units.count(step.global_step)} took {units.seconds(step.seconds)}, "
        f"{step.seconds / step.median_s:.3g}x the median of {units.seconds(step.median_s)}"
        if step.median_s > 0
        else f"step {units.count(step.global_step)} took {units.seconds(step.seconds)}"
    )
    if step.phase is not None:
        message += f": {units.seconds(step.excess_s)} more in {step.phase}"
        message += " than usual" if step.rank is None else f" of rank {step.rank}"
    elif step.rank is not None:
        message += f": rank {step.rank} was late"
    return EventRow(step.time, () if step.rank is None else (step.rank,), "slow step", message)


def _stopped(job: JobSnapshot, state: State) -> Iterable[EventRow]:
    """Yield the ranks that are gone, where they have not said so themselves."""
    said = {event.rank for event in job.events if event.kind == "error"}
    has_begun = has_ended(job) or state.time - job.started > STARTS_WITHIN_S
    for rank in job.ranks:
        if rank.state == "dead" or (rank.state == "failed" and rank.rank not in said):
            message = whereabouts(rank, state)
            if rank.error and rank.state == "dead":
                message = f"{rank.error}, in {message.removeprefix('died in ')}"
            elif rank.error:
                message = f"{message}: {rank.error}"
            yield EventRow(rank.last_seen or job.started, (rank.rank,), "stopped", message)
        elif rank.state == "missing" and has_begun:
            yield EventRow(job.started, (rank.rank,), "stopped", _unseen(rank))


def _unseen(rank: RankSnapshot) -> str:
    return f"cannot be read: {rank.error}" if rank.error else "has no telemetry on this host"
