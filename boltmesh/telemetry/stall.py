"""Whether a running job still makes progress, from a snapshot of it."""

from collections.abc import Iterable

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot

STALL_AT_LEAST_S = 15.0
STALL_IN_BATCHES = 10.0
STALL_IN_LONGEST = 3.0
"""A job is stalled when no rank has recorded anything for this many of its batches, for this many
times its longest recent one, in which the optimizer may step, and at least this long."""

LONG_PHASES = frozenset({"validation", "checkpoint"})
LONG_LIMIT_S = 600.0
"""The limit while ranks are in these phases, the others waiting for them in a collective; and
before the first optimizer step is seen, when kernels are compiled and data is loaded."""

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
    silent_s = silence(job, now)
    if silent_s is None or silent_s < STALL_AT_LEAST_S or silent_s < stall_limit_s(live_ranks(job)):
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
    """Return the limit outside of long phases; None before an optimizer step is seen."""
    limits = [limit_s for rank in ranks if (limit_s := _limit_s(rank)) is not None]
    return max(STALL_AT_LEAST_S, *limits) if limits else None


def _limit_s(rank: RankSnapshot) -> float | None:
    """Return the limit by the newest batches of a rank, as far back as its optimizer stepped."""
    batch_s = recent_step_seconds(rank)
    longest_s = 0.0
    has_stepped = False
    for at in range(len(rank.steps) - 1, 0, -1):
        batch = rank.steps[at]
        if batch.seconds > longest_s:
            long_s = sum(phase.seconds for phase in batch.phases if phase.name in LONG_PHASES)
            longest_s = max(longest_s, batch.seconds - long_s)
        has_stepped = has_stepped or batch.global_step != rank.steps[at - 1].global_step
        if has_stepped and len(rank.steps) - at >= RECENT_STEPS:
            break
    if batch_s is None or not has_stepped:
        return None
    return max(STALL_IN_BATCHES * batch_s, STALL_IN_LONGEST * longest_s)


def recent_step_seconds(rank: RankSnapshot) -> float | None:
    """Return the mean time of the rank's recent steps."""
    recent = rank.steps[-RECENT_STEPS:]
    return sum(step.seconds for step in recent) / len(recent) if recent else None
