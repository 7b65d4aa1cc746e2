"""Samples and tokens a second over the recent past."""

import math
from typing import Literal

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot

Unit = Literal["samples", "tokens"]


def throughput(job: JobSnapshot, unit: Unit) -> float | None:
    """Return the job's recent rate."""
    return job.samples_per_second if unit == "samples" else job.tokens_per_second


def throughput_over_time(job: JobSnapshot, unit: Unit, *, buckets: int) -> list[float]:
    """Return the job's rate in equal spans of the recent past, oldest first.

    One rank's records are scaled up to the job's rate: in synchronous training every rank keeps the
    same pace, and a job of a thousand ranks costs no more to draw. There are at most ``buckets``
    spans, and fewer where a span would hold less than two steps and show only noise.
    """
    job_rate = throughput(job, unit)
    rank = next((rank for rank in job.ranks if len(rank.steps) >= 3), None)
    if job_rate is None or rank is None:
        return []
    rank_rate = rank.samples_per_second if unit == "samples" else rank.tokens_per_second
    if not rank_rate:
        return []
    return [amount * job_rate / rank_rate for amount in _rate_in_spans(rank, unit, buckets=buckets)]


def _rate_in_spans(rank: RankSnapshot, unit: Unit, *, buckets: int) -> list[float]:
    """Return the rank's mean rate in each span, a step counted evenly over its own time."""
    first, *steps = rank.steps
    start, span_s = first.end_time, rank.steps[-1].end_time - first.end_time
    buckets = max(1, min(buckets, len(steps) // 2))
    if not 0 < span_s < math.inf or not all(math.isfinite(step.end_time) for step in steps):
        return []
    amounts = [0.0] * buckets
    began = 0.0
    for step in steps:
        ended = (step.end_time - start) / span_s * buckets
        # A clock that was set back while the job ran leaves a step without time.
        if ended > began:
            density = (getattr(step, unit) or 0) / (ended - began)
            for place in range(int(began), min(int(ended) + 1, buckets)):
                overlap = min(ended, place + 1) - max(began, place)
                amounts[place] += density * max(0.0, overlap)
            began = ended
    return [amount * buckets / span_s for amount in amounts]
