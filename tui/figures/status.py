"""The one line that says what is wrong with a job, and nothing when nothing is."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.tui import units
from boltmesh.tui.figures.phases import recent_step_seconds
from boltmesh.tui.state import State

Level = Literal["muted", "good", "warn", "bad"]

STALL_AT_LEAST_S = 15.0
STALL_IN_STEPS = 10.0
"""A job is called stalled when nothing was recorded for this many of its steps, and this long."""


class Status(msgspec.Struct, frozen=True):
    """A sentence, and how much it matters."""

    level: Level
    text: str


def status(state: State) -> Status | None:
    """Return what the reader should know first, or None while all is well."""
    if state.lost is not None:
        return Status(
            "warn", f"the job can no longer be read, this is its last state: {state.lost}"
        )
    job = state.job
    if job.state == "finished":
        ran = units.duration(job.updated - job.started)
        return Status("good", f"finished after {ran} at step {units.count(job.global_step)}")
    if job.state != "running":
        return Status("bad", f"{job.state}: {_cause(job)}")
    if not any(rank.steps for rank in job.ranks):
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
    running = [rank for rank in state.job.ranks if rank.state == "running"]
    if not running:
        return None
    silent_s = state.time - max(rank.last_seen for rank in running)
    step_s = max((recent_step_seconds(rank) or 0.0 for rank in running), default=0.0)
    if silent_s < max(STALL_AT_LEAST_S, STALL_IN_STEPS * step_s):
        return None
    # A validation or a checkpoint may well take that long; then the phase is the whole story.
    phases = {rank.phase for rank in running}
    level: Level = "muted" if phases <= {"validation", "checkpoint"} else "warn"
    return Status(level, f"no step for {units.duration(silent_s)}: {_where(running)}")


def _where(ranks: Iterable[RankSnapshot]) -> str:
    """Name the phases that ranks are in, the rarest first: there the cause is most often found."""
    by_phase: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_phase[rank.phase or "an unknown phase"].append(rank.rank)
    if len(by_phase) == 1:
        return f"all ranks are in {next(iter(by_phase))}"
    parts = [
        f"{_name(members)} in {phase}"
        for phase, members in sorted(by_phase.items(), key=lambda item: (len(item[1]), item[0]))
    ]
    return ", ".join(parts)


def _name(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    if len(ranks) <= 4:
        return f"ranks {', '.join(map(str, ranks))} are"
    return f"{len(ranks)} ranks are"


def _broken_loss(job: JobSnapshot) -> Status | None:
    losses = [point for point in job.history if point.name == "loss"]
    if not losses or math.isfinite(losses[-1].value):
        return None
    first = losses[-1]
    for point in reversed(losses):
        if math.isfinite(point.value):
            break
        first = point
    return Status("bad", f"the loss is {first.value} since step {units.count(first.global_step)}")
