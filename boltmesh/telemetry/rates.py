"""What a rank's records come to over its recent steps: items a second, bytes a step."""

from collections.abc import Callable, Sequence
from typing import Final

from boltmesh.telemetry import layout
from boltmesh.telemetry.cleaning import clean
from boltmesh.telemetry.phases import CHECKPOINT, VALIDATION
from boltmesh.telemetry.rank_reader import RankReader, Step, Traffic
from boltmesh.telemetry.snapshot import CollectiveTotal

RECENT_STEPS: Final = 50
WARM_UP_STEPS: Final = 2
"""The first optimizer steps of a run move more: DDP rebuilds its buckets and tells all ranks."""


def per_second(steps: Sequence[Step], items: Callable[[Step], int]) -> float | None:
    """Return items a second over the recent steps, validation and checkpoints left out.

    Without the first step of the run as soon as there are others, for it warms up.
    """
    recent = [step for step in steps[-RECENT_STEPS:] if step.sequence > 1] or list(steps)
    if not recent or any(items(step) < 0 for step in recent):
        return None
    nanoseconds = sum(
        step.total_ns - step.phases_ns[VALIDATION] - step.phases_ns[CHECKPOINT] for step in recent
    )
    return sum(map(items, recent)) * 1e9 / nanoseconds if nanoseconds > 0 else None


def _window(steps: Sequence[Step], traffic: Sequence[Traffic]) -> tuple[int, int, int] | None:
    """Return the recent optimizer steps: after which record, up to which, and how many."""
    ends = []
    before = 0 if steps and steps[0].sequence == 1 else None
    for step in steps:
        if before is not None and step.global_step > before:
            ends.append(step.sequence)
        before = step.global_step
    if steps and steps[0].sequence == 1:
        ends = ends[WARM_UP_STEPS - 1 :]
    if traffic and traffic[0].sequence > 1:
        # Of the step of the oldest record, the beginning may be overwritten.
        ends = [sequence for sequence in ends if sequence >= traffic[0].step]
    ends = ends[-RECENT_STEPS - 1 :]
    return (ends[0], ends[-1], len(ends) - 1) if len(ends) > 1 else None


def collective_totals(reader: RankReader) -> list[CollectiveTotal]:
    """Return each operator on each group.

    The means leave out what validation and checkpoints move, for no step needs that.
    """
    steps, traffic = list(reader.steps.records.values()), list(reader.traffic.records.values())
    window = _window(steps, traffic)
    sums: dict[tuple[int, int], list[int]] = {}
    untimed = set()
    if window is not None:
        for record in reversed(traffic):
            if record.step <= window[0]:
                break
            if record.step > window[1] or record.phase in {VALIDATION, CHECKPOINT}:
                continue
            key = (record.group, record.operator)
            total = sums.setdefault(key, [0, 0, 0])
            total[0] += 1
            total[1] += record.payload_bytes
            total[2] += record.done_ns - record.enqueued_ns
            if not record.done_ns or not record.flags & layout.TRAFFIC_IS_TIMED:
                untimed.add(key)
    result: list[CollectiveTotal] = []
    facts = reader.facts
    for key, (calls, payload_bytes) in sorted(reader.counters().items()):
        if key[0] >= len(facts.groups) or key[1] >= len(facts.operators):
            continue  # its names are not written yet
        group = facts.groups[key[0]]
        num_steps = window[2] if window is not None else 0
        mean = sums.get(key, [0, 0, 0])
        is_timed = num_steps > 0 and key in sums and key not in untimed
        found = CollectiveTotal(
            axis=clean(group.axis, 40),
            group=clean(group.name, 100),
            operator=clean(facts.operators[key[1]], 60),
            calls=calls,
            payload_bytes=payload_bytes,
            calls_per_step=mean[0] / num_steps if num_steps else None,
            bytes_per_step=mean[1] / num_steps if num_steps else None,
            seconds_per_step=mean[2] / num_steps / 1e9 if is_timed else None,
        )
        result.append(found)
    return result
