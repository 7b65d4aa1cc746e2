"""Findings on jobs that failed, that stall, or whose loss is not finite."""

import math

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.tui import units
from boltmesh.tui.metrics.findings.finding import Finding
from boltmesh.tui.metrics.hangs import first_to_go, hangs, last_collective
from boltmesh.tui.metrics.status import Stall, find_stall, tell_phases
from boltmesh.tui.state import State

HANG = "hang: "
"""Prefix of a rank's explanation of a hang."""

STOPPED_PROCESS = "is stopped by a signal"
"""Part of that message about a rank whose process is stopped (``hang_detection/inspect.py``)."""

MAX_GROUPS = 2
"""Stuck groups that the finding names; the events screen has all of them."""


def find_crash(state: State) -> Finding | None:
    """Name the first rank to fail, where it was, and its last log."""
    job = state.job
    if job.state not in {"failed", "crashed"}:
        return None
    first = first_to_go(job)
    what = job.cause or (
        f"{units.ranks([first.rank])} went first" if first is not None else "no rank says why"
    )
    return Finding(
        kind="crashed",
        severity="bad",
        headline=f"{job.state}: {what.rstrip('.')}",
        evidence=() if first is None else _last_words(state, first),
        advice=_next_run(job, first),
        ranks=() if first is None else (first.rank,),
    )


def _last_words(state: State, rank: RankSnapshot) -> tuple[str, ...]:
    job, words = state.job, []
    if job.cause is None:  # which otherwise has the place
        where = rank.phase or "an unknown phase"
        words.append(f"in {where} after step {units.count(rank.global_step)}")
    entered = last_collective(rank, state)
    if entered is not None and "inside" not in (job.cause or ""):
        words.append(entered)
    last = rank.steps[-1] if rank.steps else None
    if last is not None and last.loss is not None:
        words.append(f"last loss {units.number(last.loss)} at step {units.count(last.global_step)}")
    said = [
        event
        for event in job.events
        if event.rank == rank.rank
        and event.kind != "end"
        and not event.message.startswith(("alert: ", "alert is over: "))  # the watcher's own
    ]
    if said:
        newest = max(said, key=lambda event: event.time)
        words.append(f"last event: {newest.kind}, {newest.message}")
    if rank.error and rank.error not in (job.cause or ""):
        words.append(rank.error)
    return tuple(words)


def _next_run(job: JobSnapshot, first: RankSnapshot | None) -> str:
    # The reader names the signal in the cause, the rank's own record in its error.
    told = f"{job.cause or ''} {first.error or '' if first is not None else ''}".lower()
    if "out of memory" in told:
        cure = "use a smaller batch on each rank or activation checkpointing"
    elif "sigkill" in told:
        cure = "look for the kernel's out-of-memory killer in `dmesg` on the rank's host"
    else:
        cure = "read that rank's own output"
    if job.checkpoint is None:
        return f"{cure}; there is no checkpoint to go on from"
    return f"{cure}; then go on from {job.checkpoint}"


def find_broken_loss(state: State) -> Finding | None:
    """Say since when the loss is NaN or infinite, and on which ranks."""
    job = state.job
    if job.state != "running":
        return None
    series = state.series.get("loss")
    points = () if series is None else tuple(zip(series.steps, series.values, strict=True))
    since, value, before = None, math.nan, None
    for step, found in reversed(points):
        if math.isfinite(found):
            before = (step, found)
            break
        since, value = step, found
    broken = _ranks_without_a_loss(job)
    if since is None and not broken:
        return None
    ranks = () if len(broken) == len(job.ranks) else broken
    where = f" on {units.ranks(ranks)}" if ranks else ""
    when = "" if since is None else f" since step {units.count(since)}"
    evidence = [] if before is None else [f"{units.number(before[1])} at step {before[0]:,}"]
    evidence += [f"newest {name} {units.number(job.metrics[name])}" for name in _norms(job)]
    back = f"; go back to {job.checkpoint}" if job.checkpoint is not None else ""
    return Finding(
        kind="loss",
        severity="bad",
        headline=f"the loss is {value}{where}{when}",
        evidence=tuple(evidence),
        advice="lower the learning rate or clip gradients, and look at the batch of that step"
        + back,
        ranks=ranks,
    )


def _ranks_without_a_loss(job: JobSnapshot) -> tuple[int, ...]:
    found = []
    for rank in job.ranks:
        newest = next((step.loss for step in reversed(rank.steps) if step.loss is not None), None)
        if newest is not None and not math.isfinite(newest):
            found.append(rank.rank)
    return tuple(found)


def _norms(job: JobSnapshot) -> list[str]:
    return [name for name in sorted(job.metrics) if "norm" in name.lower()][:1]


def find_standstill(state: State) -> Finding | None:
    """Say that no rank makes steps, where all of them are, and which ranks they wait for."""
    stall = find_stall(state)
    if stall is None or stall.is_expected:
        return None
    stuck = [hang for hang in hangs(state) if hang.is_first]
    suspects = tuple(sorted({rank for hang in stuck for rank in hang.row.missing}))
    if not suspects and len(stall.phases) > 1:
        fewest, others, *_ = sorted(stall.phases.values(), key=len)
        if len(fewest) < len(others):  # equal numbers do not show which side is at fault
            suspects = fewest
    explained = _explained(state, stall)
    return Finding(
        kind="stalled",
        severity="warn",
        headline=f"stalled: no step for {units.duration(stall.silent_s)}, {tell_phases(stall)}",
        evidence=explained or tuple(hang.text for hang in stuck[:MAX_GROUPS]),
        advice=_unblock(state.job, stall, suspects, explained),
        ranks=suspects,
    )


def _explained(state: State, stall: Stall) -> tuple[str, ...]:
    """The newest explanation that a rank of the job recorded; it names lines of code as well."""
    since = state.time - stall.silent_s
    told = [
        event.message.removeprefix(HANG)
        for event in state.job.events
        if event.message.startswith(HANG) and event.time > since
    ]
    return tuple(told[-1:])


def _unblock(
    job: JobSnapshot, stall: Stall, suspects: tuple[int, ...], explained: tuple[str, ...]
) -> str:
    pids = [rank.pid for rank in job.ranks if rank.rank in suspects and rank.pid is not None]
    if pids and any(STOPPED_PROCESS in text for text in explained):
        return f"continue {units.ranks(suspects)}: `kill -CONT {' '.join(map(str, pids))}`"
    if pids:
        return f"see what {units.ranks(suspects)} does: `py-spy dump --pid {pids[0]}` on its host"
    if "data" in stall.phases:
        return "the loader gives no batch: look at its workers and at the storage they read"
    if len({rank.host for rank in job.ranks if rank.host}) > 1:
        return "look at the network between the hosts, and at what each rank wrote last"
    return "see what each rank does: `py-spy dump --pid PID`, with the pids of screen 5"
