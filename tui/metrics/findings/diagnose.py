"""Every finding on a job, the most severe first."""

from collections.abc import Callable

from boltmesh.tui.metrics.findings import ends, limits, waits
from boltmesh.tui.metrics.findings.finding import Finding, Kind
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.stragglers import Balance, balance
from boltmesh.tui.state import State

_ALWAYS: tuple[Callable[[State], Finding | None], ...] = (
    ends.find_crash,
    ends.find_broken_loss,
    ends.find_standstill,
    limits.find_memory,
    limits.find_traffic,
    limits.find_busy_host,
)


_IN_STEADY_STATE: tuple[Callable[[State, Balance], Finding | None], ...] = (
    waits.find_input,
    waits.find_offload,
    waits.find_bubble,
    waits.find_communication,
    waits.find_experts,
    waits.find_uneven,
)


_URGENT: tuple[Kind, ...] = ("crashed", "loss", "stalled", "memory", "traffic")
"""Kinds that come before any that merely costs time, in this order."""


@remember_last
def diagnose(state: State) -> tuple[Finding, ...]:
    """Return the findings, the most severe first; none if there is no problem."""
    found = [finding for find in _ALWAYS if (finding := find(state)) is not None]
    kinds = {finding.kind for finding in found}
    if "host" in kinds:
        return tuple(sorted(found, key=_urgency))  # times say nothing of the job itself
    if (late := waits.find_straggler(state)) is not None:
        found.append(late)
    typical = balance(state.job) if state.job.state == "running" else None
    if typical is not None and "stalled" not in kinds:
        found += [
            finding for judge in _IN_STEADY_STATE if (finding := judge(state, typical)) is not None
        ]
    return tuple(sorted(found, key=_urgency))


def _urgency(finding: Finding) -> tuple[bool, int, float]:
    place = _URGENT.index(finding.kind) if finding.kind in _URGENT else len(_URGENT)
    return (finding.severity != "bad", place, -finding.cost)
