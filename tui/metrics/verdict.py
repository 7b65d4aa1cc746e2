"""Whether measured bytes are those that the strategy states, and what a difference comes from."""

from typing import Literal

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.metrics.step_time import batches_per_step

Verdict = Literal["equal", "differs", "missing", "unstated", "pending"]
"""``missing``: expected, but never seen. ``unstated``: seen, and the strategy says nothing about
it. ``pending``: too few steps to tell."""

TOLERANCE = 0.005
"""Counting is exact, but a mean over steps may hold a part of another one, such as a validation."""

STEPS_BEFORE_A_VERDICT = 3
"""The first steps of DDP also move what it needs to arrange its buckets."""


def judge(
    payload: float | None, expected: ExpectedTraffic | None, job: JobSnapshot, *, is_seen: bool
) -> Verdict:
    """Compare the bytes of a step with what the strategy states, if it states anything."""
    if expected is None:
        return "unstated"
    is_early = job.global_step < STEPS_BEFORE_A_VERDICT or job.communication_note is not None
    if is_early or (is_seen and payload is None):
        return "pending"
    if not is_seen:
        return "missing" if expected.payload_bytes else "equal"
    difference = abs((payload or 0) - expected.payload_bytes)
    return "equal" if difference <= TOLERANCE * expected.payload_bytes else "differs"


def explain(
    verdict: Verdict,
    payload: float | None,
    expected: ExpectedTraffic | None,
    calls: float | None,
    job: JobSnapshot,
) -> str | None:
    """Say what a verdict most likely comes from; None where there is nothing to explain."""
    if verdict == "unstated":
        return "the strategy states nothing about it: the model, a metric or Lightning calls it"
    if verdict == "missing":
        return "no rank that is seen has called it"
    if verdict != "differs" or expected is None or payload is None:
        return None
    if not expected.payload_bytes:
        return "the strategy expects none of it"
    ratio = payload / expected.payload_bytes
    batches = batches_per_step(job)
    if batches > 1 and _is_near(ratio, batches):
        return f"once for each of the {batches} batches of a step: no_sync is missing"
    if ratio >= 1.5 and _is_near(ratio, round(ratio)):
        return f"all of it is moved {round(ratio)} times a step"
    if _is_near(ratio, 0.5):
        return "half of the bytes: sent in 16 bits where 32 were expected?"
    if expected.calls and calls and not _is_near(calls, expected.calls):
        return f"{calls:,.3g} calls a step, and {expected.calls:,.3g} were expected"
    return "more than the strategy states" if ratio > 1 else "less than the strategy states"


def _is_near(value: float, target: float) -> bool:
    return abs(value - target) <= TOLERANCE * target
