"""Events of a job: those of the ranks, and those seen from outside.

The same message of many ranks is one line. ``draw_event_table`` has all events, the newest first;
``draw_events`` has the newest in short, the last at the bottom.

``slow_steps`` finds steps that took much longer than the others, and their cause. The ranks of a
job wait for each other, so a step that is slow on one is slow on all: a few ranks are searched for
slow steps, and all ranks only for the cause of each.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from boltmesh.telemetry.snapshot import PHASES, Event, JobSnapshot, RankSnapshot, StepRecord
from boltmesh.tui import units
from boltmesh.tui.metrics.hangs import hangs, whereabouts
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.sequences import has_ended
from boltmesh.tui.metrics.step_time import (
    INTERRUPTIONS,
    WARM_UP_BATCHES,
    batches_per_step,
    working_seconds,
)
from boltmesh.tui.render.line import Line, Role, fit
from boltmesh.tui.render.style import Style, heading, sentence
from boltmesh.tui.render.table import AS_IT_COMES, Cell, Column, browse, selected_row
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

SLOW_FACTOR = 2.0
SLOW_DEVIATIONS = 8.0
"""A step is slow when it takes this many times the median, and is this many median deviations
beyond it: where all steps differ, none of them is an event."""

MIN_STEPS = 10
"""Fewer steps have no median to speak of."""

SEARCHED_RANKS = 4
MAX_SLOW_STEPS = 8
"""Half of them the newest, half the longest: for each of them every rank is looked at."""

CULPRIT_SHARE = 0.5
"""A rank is named when the time that it alone took is this much of the delay."""

_COMMUNICATION = PHASES.index("communication")


class SlowStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step, on the slowest of the ranks."""

    index: int
    """Number of the batch."""
    global_step: int
    time: float
    """Wall clock of its end."""
    seconds: float
    median_s: float
    rank: int | None
    """The rank that the others waited for; None if no single one is clearly later."""
    phase: str | None
    """The phase that took longer than usual; None if no phase did."""
    excess_s: float
    """How much longer that phase took than its median."""


@remember_last
def slow_steps(job: JobSnapshot) -> tuple[SlowStep, ...]:
    """Return the slow steps that the rings still hold, oldest first."""
    stride = max(1, len(job.ranks) // SEARCHED_RANKS)
    found: dict[int, tuple[RankSnapshot, StepRecord, float]] = {}
    for rank in job.ranks[::stride]:
        for step, usual_s in _slow_records(rank.steps):
            known = found.get(step.index)
            if known is None or step.seconds > known[1].seconds:
                found[step.index] = (rank, step, usual_s)
    half = MAX_SLOW_STEPS // 2
    older, newest = sorted(found)[:-half], sorted(found)[-half:]
    longest = sorted(older, key=lambda index: (found[index][1].seconds, index))[-half:]
    return tuple(_explain(job, *found[index]) for index in sorted([*longest, *newest]))


def _slow_records(steps: Sequence[StepRecord]) -> Iterable[tuple[StepRecord, float]]:
    """Yield the slow records of one rank, each with the median of its like.

    Where a step accumulates batches, the last of them also updates the model: the batches that end
    a step are compared with each other, and the others with each other.
    """
    alike: tuple[list[StepRecord], list[StepRecord]] = ([], [])
    for before, step in pairwise(steps):
        if step.index >= WARM_UP_BATCHES:
            alike[step.global_step > before.global_step].append(step)
    for records in alike:
        if len(records) < MIN_STEPS:
            continue
        times = sorted(step.seconds for step in records)
        usual_s = times[len(times) // 2]
        if times[-1] <= SLOW_FACTOR * usual_s:
            continue
        deviation_s = median(abs(seconds - usual_s) for seconds in times)
        limit_s = max(SLOW_FACTOR * usual_s, usual_s + SLOW_DEVIATIONS * deviation_s)
        for step in records:
            if step.seconds > limit_s and working_seconds(step) > limit_s:
                yield step, usual_s


def _explain(job: JobSnapshot, seen: RankSnapshot, step: StepRecord, usual_s: float) -> SlowStep:
    delay_s = working_seconds(step) - usual_s
    own = sorted(
        (
            (_own_s(record), rank)
            for rank in job.ranks
            if (record := _record(rank, step.index)) is not None
        ),
        key=lambda item: item[0],
    )
    slowest_s, slowest = own[-1]
    middle_s = own[(len(own) - 1) // 2][0]
    is_alone = len(own) > 1 and slowest_s - middle_s >= CULPRIT_SHARE * delay_s
    culprit = slowest if is_alone else seen
    record = _record(culprit, step.index) or step
    phase, excess_s = _longest_phase(culprit, record)
    return SlowStep(
        index=step.index,
        global_step=step.global_step,
        time=step.end_time,
        seconds=step.seconds,
        median_s=usual_s,
        rank=slowest.rank if is_alone else None,
        phase=phase if excess_s >= CULPRIT_SHARE * delay_s else None,
        excess_s=excess_s,
    )


def _record(rank: RankSnapshot, index: int) -> StepRecord | None:
    """Return the record of a batch; the ring holds consecutive ones, save where some were torn."""
    if not rank.steps:
        return None
    at = index - rank.steps[0].index
    if 0 <= at < len(rank.steps) and rank.steps[at].index == index:
        return rank.steps[at]
    return next((step for step in rank.steps if step.index == index), None) if at >= 0 else None


def _own_s(step: StepRecord) -> float:
    """Return a rank's time without waits for others: the late rank waits the shortest."""
    phases = step.phases
    # A record of this version has all phases in their order, which saves looking for the one.
    if len(phases) == len(PHASES) and phases[_COMMUNICATION].name == "communication":
        return step.seconds - phases[_COMMUNICATION].seconds
    return step.seconds - sum(phase.seconds for phase in phases if phase.name == "communication")


def _longest_phase(rank: RankSnapshot, step: StepRecord) -> tuple[str | None, float]:
    """Return the phase that exceeds its median over the rank's recent steps the most."""
    usual: dict[str, list[float]] = {}
    recent = [each for each in rank.steps[-64:] if each.index != step.index]
    for each in recent:
        for phase in each.phases:
            usual.setdefault(phase.name, []).append(phase.seconds)
    excess = [
        (phase.seconds - (median(usual[phase.name]) if phase.name in usual else 0.0), phase.name)
        for phase in step.phases
        if phase.name not in INTERRUPTIONS
    ]
    excess_s, name = max(excess, default=(0.0, None))
    return name, excess_s


SAME_MOMENT_S = 30.0
"""Ranks reach the same point of a program within this time."""

STARTS_WITHIN_S = 60.0
"""Time in which a rank without a file is no event: the file of a running job is still to come."""

MAX_HANGS = 8
"""Groups that are listed among the events; in a large mesh one missing rank blocks most of them."""

_ALERTS = ("alert: ", "alert is over: ")
"""Beginnings of the messages of the watcher's alerts."""


class EventRow(msgspec.Struct, frozen=True):
    """One event, and the ranks that reported it."""

    time: float
    ranks: tuple[int, ...]
    """Empty if it concerns no rank in particular."""
    kind: str
    """Kind of the Event; or ``alert``, ``hang``, ``slow step``, ``stopped``."""
    message: str


@remember_last
def timeline(state: State) -> tuple[EventRow, ...]:
    """Return events of the ranks and those seen from outside, oldest first."""
    job = state.job
    told = [_told(event) for event in job.events]
    slow = [_slow(step, batches_per_step(job)) for step in slow_steps(job)]
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


def _slow(step: SlowStep, batches: int) -> EventRow:
    name = f"step {units.count(step.global_step)}"
    if batches > 1:
        name = f"batch {units.count(step.index)}"
    message = f"{name} took {units.seconds(step.seconds)}"
    if step.median_s > 0:
        times = f"{step.seconds / step.median_s:.3g}x"
        message += f", {times} the median of {units.seconds(step.median_s)}"
    if step.phase is not None:
        message += f": {units.seconds(step.excess_s)} more in {step.phase}"
        message += " than usual" if step.rank is None else f" of rank {step.rank}"
    elif step.rank is not None:
        message += f": rank {step.rank} was late"
    return EventRow(step.time, () if step.rank is None else (step.rank,), "slow step", message)


def _stopped(job: JobSnapshot, state: State) -> Iterable[EventRow]:
    """Yield the ranks that are gone and have not reported it themselves."""
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


COLUMNS = ("time", "ranks", "kind", "message")
"""Titles that the table can be sorted by."""

MAX_MESSAGE_LINES = 6
_ROOM_FOR_A_MESSAGE = 8
"""Height from which on the selected event is also shown in full."""

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
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
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
    top = [heading("events", width, look, right=seen.hidden)] if look.has_headings else []
    return [*top, seen.header, *seen.lines, *words][:height]


def shown_events(state: State, table: TableView) -> list[EventRow]:
    """Return the filtered and sorted rows."""
    return arrange_rows(timeline(state)[::-1], lambda row: _cells_of(row, state), table)


def who(ranks: tuple[int, ...], world_size: int) -> str:
    """Name the ranks of an event; an event of no rank in particular concerns the job."""
    if not ranks:
        return "the job"
    return "all ranks" if len(ranks) == world_size > 1 else units.ranks(ranks, most=2)


def clock(moment: float, now: float) -> str:
    """Return the time of day, with the date where that is not today's."""
    is_today = _calendar(moment, "%Y %j") == _calendar(now, "%Y %j")
    return _calendar(moment, "%H:%M:%S" if is_today else "%b %d %H:%M")


def _calendar(moment: float, words: str) -> str:
    try:
        return time.strftime(words, time.localtime(moment))
    except (OverflowError, ValueError, OSError):  # no moment that a calendar knows
        return units.UNKNOWN


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
        # To be found by the words on the screen.
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


def _in_full(row: EventRow, state: State, width: int, look: Style) -> list[Line]:
    when = _calendar(row.time, "%Y-%m-%d %H:%M:%S")
    names = units.ranks(row.ranks, most=12) if row.ranks else "the job"
    title = Line(when, "strong").add(f"  {names}  ", "muted")
    title.add(row.kind, KIND_ROLES.get(row.kind, "muted"))
    return [
        title.crop(width),
        *sentence(row.message, width, look, max_lines=MAX_MESSAGE_LINES),
    ]


def draw_events(state: State, width: int, height: int, look: Style) -> list[Line]:
    """As many of the newest events as fit."""
    lines = [heading("events", width, look)] if look.has_headings else []
    room = max(0, height - len(lines))
    rows = timeline(state)
    if not rows:
        return [*lines, Line("no events yet", "muted").crop(width)][:height]
    shown = rows[-room:] if room else ()
    ranks = max((len(who(row.ranks, state.job.world_size)) for row in shown), default=0)
    return [*lines, *(event_line(row, state, width, look, ranks=ranks) for row in shown)][:height]


def event_line(row: EventRow, state: State, width: int, look: Style, *, ranks: int = 0) -> Line:
    """Time, ranks in a column of ``ranks`` cells, kind and message of one event."""
    line = _event_head(row, state, ranks)
    room = max(0, width - line.width)
    return line.add(fit(row.message, room, ellipsis=look.glyphs.ellipsis)).crop(width)


def events_text(state: State, width: int, most: int, look: Style) -> list[Line]:
    """The newest events with their messages in full, for text that has no height."""
    rows = timeline(state)[-most:]
    ranks = max((len(who(row.ranks, state.job.world_size)) for row in rows), default=0)
    return [
        line
        for row in rows
        for line in sentence(
            row.message, width, look, mark=_event_head(row, state, ranks).plain, max_lines=None
        )
    ] or [Line("no events yet", "muted")]


def _event_head(row: EventRow, state: State, ranks: int) -> Line:
    line = Line(clock(row.time, state.time), "muted").add("  ")
    line.add(who(row.ranks, state.job.world_size).ljust(max(9, ranks)), "muted")
    return line.add("  ").add(row.kind.ljust(10), KIND_ROLES.get(row.kind, "muted")).add("  ")
