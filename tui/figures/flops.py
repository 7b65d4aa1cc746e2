"""How much the job computes, and what share that is of what its devices can do.

The model FLOPs utilisation counts what the model needs, not what was run: recomputed activations
and padding do not raise it (Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311).
"""

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.tui.figures.memo import remember_last
from boltmesh.tui.figures.profile import rank_profiles


class Flops(msgspec.Struct, frozen=True):
    """Of the whole job, over its recent ordinary steps."""

    per_second: float
    """Model FLOPs of all ranks whose FLOPs are known, a second."""
    utilization: float | None
    """Share of the peak of the same ranks; None where the peak of one is not known."""
    num_ranks: int
    """Those that are in it."""


@remember_last
def job_flops(job: JobSnapshot) -> Flops | None:
    """Return what the job computes, or None where no rank says what a batch costs."""
    if job.state != "running":
        return None
    profiles = rank_profiles(job)
    done = 0.0
    peak: float | None = 0.0
    num_ranks = 0
    for rank in job.ranks:
        profile = profiles.get(rank.rank)
        if profile is None or not _has_flops(rank):
            continue
        num_ranks += 1
        done += (rank.flops_per_batch or 0.0) / profile.step_s
        known = rank.peak_flops_per_second
        peak = None if peak is None or not known or known <= 0 else peak + known
    if not num_ranks:
        return None
    return Flops(done, done / peak if peak else None, num_ranks)


def rank_flops(job: JobSnapshot, rank: RankSnapshot) -> Flops | None:
    """Return the same of one rank."""
    profile = rank_profiles(job).get(rank.rank)
    if profile is None or not _has_flops(rank):
        return None
    done = (rank.flops_per_batch or 0.0) / profile.step_s
    peak = rank.peak_flops_per_second
    return Flops(done, done / peak if peak and peak > 0 else None, 1)


def _has_flops(rank: RankSnapshot) -> bool:
    return rank.flops_per_batch is not None and rank.flops_per_batch > 0
