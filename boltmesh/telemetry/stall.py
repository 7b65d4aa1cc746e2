"""Whether a running job still makes progress, from a snapshot of it."""

from collections.abc import Iterable

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot

STALL_AT_LEAST_S = 15.0
STALL_IN_STEPS = 10.0
"""A job is stalled when no rank has recorded anything for this many of its steps, and this long."""

LONG_PHASES = frozenset({"validation", "checkpoint"})
LONG_LIMIT_S = 600.0
"""The limit while ranks are in these phases, the others waiting for them in a collective; and
before the first step is complete, when kernels are compiled and data is loaded."""

RECENT_STEPS = 20
"""Steps whose mean is the typical step."""


def whole_steps(num_batches: int, batches_per_step: int) -> int:
    """Return the least number of batches from ``num_batches`` on that makes whole optimizer steps.

    Wherever so many batches begin, their mean has its share of those in which the optimizer steps.
    """
    return -(-num_batches // batches_per_step) * batches_per_step


def stalled_seconds(job: JobSnapshot, now: float) -> float | None:
    """Return the seconds since any rank recorded progress; None if the job is not stalled.

    Args:
        job: A job that has ended is not stalled.
        now: Wall clock of the reader, seconds since 1970.
    """
    ranks = live_ranks(job)
    silent_s = silence(job, now)
    if silent_s is None or silent_s < stall_limit_s(ranks):
        return None
    return silent_s


def silence(job: JobSnapshot, now: float) -> float | None:
    """Return the seconds since the newest record of a live rank; None without one."""
    ranks = live_ranks(job)
    return max(0.0, now - max(rank.last_seen for rank in ranks)) if ranks else None


def live_ranks(job: JobSnapshot) -> list[RankSnapshot]:
    """Return the ranks of a running job from which records are expected."""
    if job.state != "running":
        return []
    return [rank for rank in job.ranks if rank.is_alive]


def stall_limit_s(ranks: Iterable[RankSnapshot]) -> float:
    """Return how long these ranks may be silent before the job is stalled."""
    known = list(ranks)
    limit_s = typical_limit_s(known)
    phases = {rank.phase for rank in known} - {"communication"}
    if limit_s is None or (phases and LONG_PHASES.issuperset(phases)):
        return max(LONG_LIMIT_S, limit_s or 0.0)
    return limit_s


def typical_limit_s(ranks: Iterable[RankSnapshot]) -> float | None:
    """Return the limit outside of long phases; None before the first step."""
    steps = [step_s for rank in ranks if (step_s := recent_step_seconds(rank)) is not None]
    return max(STALL_AT_LEAST_S, STALL_IN_STEPS * max(steps)) if steps else None


def recent_step_seconds(rank: RankSnapshot) -> float | None:
    """Return the mean time of the rank's recent steps."""
    recent = rank.steps[-RECENT_STEPS:]
    return sum(step.seconds for step in recent) / len(recent) if recent else None
