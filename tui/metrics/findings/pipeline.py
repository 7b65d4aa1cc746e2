"""Pipelines that stand idle more than their schedule should cost."""

from boltmesh.tui.metrics.balance import Balance
from boltmesh.tui.metrics.findings.finding import Finding
from boltmesh.tui.metrics.pipelines import Bubble, BubbleRow, bubble
from boltmesh.tui.metrics.step_time import bubble_seconds, middle
from boltmesh.tui.state import State

BUBBLE_SHARE = 0.25
"""Idle time of a step. Four microbatches for each stage cost less than a fifth in GPipe and 1F1B;
what the host adds is a few percent."""

PART_SHARE = 0.1
"""Idle time that only uneven stages, or only communication and the host, may cost."""


def find_bubble(state: State, typical: Balance) -> Finding | None:
    """Say how long the ranks stand idle, and which part of it can be mended best."""
    found = bubble(state)
    if found is None or typical.step_s <= 0:
        return None
    share = min(1.0, (bubble_seconds(state) or 0.0) / typical.step_s)
    # What is told of a window of the chunks alone, told of the whole step.
    scale = share / found.mean.measured if found.mean.measured > 0 else 0.0
    parts = {
        name: scale * part
        for name in ("structural", "imbalance", "excess")
        if (part := getattr(found.mean, name)) is not None
    }
    worst = max(parts, key=lambda name: parts[name], default=None)
    avoidable = max(parts.get("imbalance", 0.0), parts.get("excess", 0.0))
    if share < BUBBLE_SHARE and avoidable < PART_SHARE:
        return None
    if avoidable >= PART_SHARE:  # the schedule's own share is known before a run, this is not
        worst = "imbalance" if parts.get("imbalance", 0.0) == avoidable else "excess"
    slow = _slowest(found) if worst == "imbalance" else None
    evidence = [f"{name} {part:.0%}" for name, part in parts.items()]
    if slow is not None:
        row, by = slow
        evidence.append(f"{_stages(row)} on rank {row.rank} works {by:.0%} longer than the median")
    if found.plan is not None:
        evidence.append(f"{found.plan.schedule}, {found.plan.num_microbatches} microbatches")
    return Finding(
        kind="bubble",
        severity="warn",
        headline=f"pipeline bubble: ranks stand idle for {share:.0%} of a step",
        evidence=tuple(evidence),
        advice=_mend(worst, found, slow),
        ranks=() if slow is None else (slow[0].rank,),
        cost=share,
    )


def _slowest(found: Bubble) -> tuple[BubbleRow, float] | None:
    """Return the rank that works longest, and by how much more than the median."""
    if len(found.rows) < 2:
        return None
    row = min(found.rows, key=lambda row: row.parts.measured)
    typical = middle(1 - each.parts.measured for each in found.rows)
    if typical <= 0:
        return None
    return row, (1 - row.parts.measured) / typical - 1


def _stages(row: BubbleRow) -> str:
    if len(row.stages) == 1:
        return f"stage {row.stages[0]}"
    return f"stages {', '.join(map(str, row.stages))}"


def _mend(worst: str | None, found: Bubble, slow: tuple[BubbleRow, float] | None) -> str:
    if worst == "imbalance" and slow is not None:
        fast = max(found.rows, key=lambda row: row.parts.measured)
        return f"move a block from {_stages(slow[0])} to {_stages(fast)}"
    if worst == "excess":
        return "look at what runs between the chunks: sends and receives, the host, logging"
    batches = "" if found.plan is None else f" than {found.plan.num_microbatches}"
    return f"use more microbatches{batches}, or an interleaved or zero-bubble schedule"
