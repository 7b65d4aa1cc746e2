"""The status line: the problem of a job, or None; stalls included.

``hangs.py`` finds the ranks that a stalled job waits for, by the sequence numbers of its groups.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, MetricPoint, RankSnapshot
from boltmesh.telemetry.stall import (
    STALL_AT_LEAST_S,
    live_ranks,
    silence,
    stalled_seconds,
    typical_limit_s,
)
from boltmesh.tui import units
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.state import State

UNKNOWN_PHASE = "an unknown phase"


class Stall(msgspec.Struct, frozen=True):
    """Silence of all running ranks."""

    silent_s: float
    phases: dict[str, tuple[int, ...]]
    """The ranks by the phase that they are in, the rarest first: there the cause is most often."""

    is_expected: bool
    """A rank is in a long phase (``stall.LONG_PHASES``, the first batch), so far not too long."""


def find_stall(state: State) -> Stall | None:
    """Return the silence, or None while steps are made."""
    silent_s = silence(state.job, state.time)
    if silent_s is None or silent_s < STALL_AT_LEAST_S:
        return None
    ranks = live_ranks(state.job)
    if silent_s < (typical_limit_s(ranks) or STALL_AT_LEAST_S):
        return None
    is_expected = job_stalled_seconds(state) is None
    return Stall(silent_s=silent_s, phases=_by_phase(ranks), is_expected=is_expected)


@remember_last
def job_stalled_seconds(state: State) -> float | None:
    """Return how long the job has made no progress; None if it is not stalled."""
    return stalled_seconds(state.job, state.time)


def rates_are_current(state: State) -> bool:
    """Say whether the job makes steps, as far as can be seen: else its rates are of the past."""
    is_running = state.job.state == "running" and state.lost is None
    return is_running and job_stalled_seconds(state) is None


def rates_age_s(state: State) -> float | None:
    """Return how long a stalled or ended job has made no step; None of others."""
    if state.job.state != "running":
        return max(0.0, state.time - state.job.updated)
    return job_stalled_seconds(state)


def _by_phase(ranks: Sequence[RankSnapshot]) -> dict[str, tuple[int, ...]]:
    by_phase: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_phase[rank.phase or UNKNOWN_PHASE].append(rank.rank)
    ordered = sorted(by_phase.items(), key=lambda item: (len(item[1]), item[0]))
    return {phase: tuple(members) for phase, members in ordered}


Level = Literal["muted", "good", "warn", "bad"]


class Status(msgspec.Struct, frozen=True):
    """A sentence, and how much it matters."""

    level: Level
    text: str


def status(state: State) -> Status | None:
    """Return the most important fact for the reader, or None while all is well."""
    if state.lost is not None:
        return Status(
            "warn", f"the job can no longer be read, this is its last state: {state.lost}"
        )
    job = state.job
    if job.state == "finished":
        if job.stop_reason is not None:
            return Status("warn", job.stop_reason)
        ran = units.duration(job.updated - job.started)
        return Status("good", f"finished after {ran} at step {units.count(job.global_step)}")
    if job.is_restarting:
        return Status("warn", f"{job.state}, and is started again: {_cause(job)}")
    if job.state != "running":
        return Status("bad", f"{job.state}: {_cause(job)}")
    if not any(rank.steps for rank in job.ranks) and job_stalled_seconds(state) is None:
        return Status("muted", "waiting for the first step")
    return _stall(state) or _broken_loss(job)


def _cause(job: JobSnapshot) -> str:
    if job.cause is not None:
        return job.cause
    ended = [rank for rank in job.ranks if rank.state in {"failed", "dead"}]
    if not ended:
        return "no rank says why"
    first = min(ended, key=lambda rank: rank.last_seen)
    where = f" in {first.phase}" if first.phase else ""
    why = f": {first.error}" if first.error else ""
    return f"rank {first.rank} went first, at step {units.count(first.global_step)}{where}{why}"


def _stall(state: State) -> Status | None:
    stall = find_stall(state)
    if stall is None:
        return None
    level: Level = "muted" if stall.is_expected else "warn"
    return Status(level, f"no step for {units.duration(stall.silent_s)}: {tell_phases(stall)}")


def tell_phases(stall: Stall) -> str:
    """Say where the ranks are."""
    if len(stall.phases) == 1:
        return f"all ranks are in {next(iter(stall.phases))}"
    return ", ".join(
        f"{units.ranks(members)} {'is' if len(members) == 1 else 'are'} in {phase}"
        for phase, members in stall.phases.items()
    )


def _broken_loss(job: JobSnapshot) -> Status | None:
    first: MetricPoint | None = None
    for point in reversed(job.history):
        if point.name == "loss":
            if math.isfinite(point.value):
                break
            first = point
    if first is None:
        return None
    return Status("bad", f"the loss is {first.value} since step {units.count(first.global_step)}")
