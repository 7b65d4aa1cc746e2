"""What an alert can be about: loss, devices and the end of the job. ``pace.py`` has the pace.

A rule is called with each look and with the alerts that are raised. It answers for the figures
that are known: whether the condition holds, and what to say. Where a figure wavers around its
threshold, a raised alert stays until the figure is clear of it.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from boltmesh.telemetry.snapshot import RankSnapshot, StepRecord
from boltmesh.tui import units
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.state import State

MEMORY_MARGIN = 0.02
"""Share of the memory by which a device has to be below the threshold again."""
TEMPERATURE_MARGIN_CELSIUS = 3.0

_FIRST_RANK = re.compile(r"rank (\d{1,9})\b")

RuleKind = Literal["loss", "throughput", "memory", "temperature", "stall", "failed"]


class Key(NamedTuple):
    """What tells one alert from another."""

    kind: RuleKind
    about: str = ""
    """Which device, where several can raise the same."""


class Condition(msgspec.Struct, frozen=True):
    """The answer of a rule."""

    holds: bool
    message: str
    rank: int | None = None


Rule = Callable[[State, Collection[Key]], Mapping[Key, Condition]]
"""Given the state and the alerts that are raised; what it leaves out is not known."""


class LossRule:
    """The loss of a step is NaN or infinite: of the newest, or of one since the last look."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def __call__(self, state: State, active: Collection[Key]) -> Mapping[Key, Condition]:
        """Return the verdict on the steps since the last look; at first on the newest alone."""
        if not state.job.alerts.loss_not_finite or state.job.state != "running":
            return {}
        broken: list[tuple[int, StepRecord]] = []
        newest: StepRecord | None = None
        for rank in state.job.ranks:
            for step in self._fresh(rank):
                newest = step if newest is None or step.index > newest.index else newest
                if step.loss is not None and not math.isfinite(step.loss):
                    broken.append((rank.rank, step))
        if broken:
            first_rank, first = min(broken, key=lambda each: (each[1].index, each[0]))
            ranks = [rank for rank, step in broken if step.index == first.index]
            of = f"rank {first_rank}" if len(ranks) == 1 else f"{len(ranks)} ranks"
            message = f"loss is {first.loss} at step {first.global_step:,}, on {of}"
            return {Key("loss"): Condition(True, message, first_rank)}
        if newest is None:
            return {}
        return {
            Key("loss"): Condition(False, f"loss is finite again at step {newest.global_step:,}")
        }

    def _fresh(self, rank: RankSnapshot) -> Iterator[StepRecord]:
        """Yield the steps with a loss that came since the last look, the newest first."""
        steps = [step for step in rank.steps[-1:] if step.loss is not None]
        before = self._seen.get(rank.rank)
        if before is not None:
            steps = []
            for step in reversed(rank.steps):
                if step.index <= before:
                    break
                if step.loss is not None:
                    steps.append(step)
        if rank.steps:
            self._seen[rank.rank] = rank.steps[-1].index
        yield from steps


class FailureRule:
    """The job failed or crashed while somebody watched; one that was dead before is no news."""

    def __init__(self) -> None:
        self._was_running = False

    def __call__(self, state: State, active: Collection[Key]) -> Mapping[Key, Condition]:
        """Return the verdict; a job that is over stays as it is."""
        job = state.job
        if job.state == "running":
            self._was_running = True
            return {Key("failed"): Condition(False, "the job runs")}
        if job.state == "finished" or not self._was_running or not job.alerts.job_failed:
            return {}
        # The cause begins with the rank that went first, where that is known.
        named = _FIRST_RANK.match(job.cause or "")
        first = int(named[1]) if named else None
        message = f"the job has {job.state}" + (f": {job.cause}" if job.cause else "")
        return {Key("failed"): Condition(True, message, first)}


def look_at_devices(state: State, active: Collection[Key]) -> Mapping[Key, Condition]:
    """Return a verdict on the memory and the temperature of each GPU that was read."""
    if state.job.state != "running":
        return {}
    found: dict[Key, Condition] = {}
    for device in state.devices:
        if device.kind == "gpu":
            found |= _memory(device, state.job.alerts.memory_share, active)
            found |= _temperature(device, state.job.alerts.temperature_celsius, active)
    return found


def _memory(
    device: DeviceReading, limit: float | None, active: Collection[Key]
) -> dict[Key, Condition]:
    used, total = device.memory_used_bytes, device.memory_total_bytes
    if limit is None or used is None or not total:
        return {}
    key = Key("memory", _name(device))
    share = used / total
    of = f"{units.memory(used)} of {units.memory(total)}"
    is_near = share >= limit - (MEMORY_MARGIN if key in active else 0.0)
    sign = "near its limit" if is_near else "below its limit again"
    message = f"memory of {_owner(device)} is {sign}: {of}, {100 * share:.1f}%"
    return {key: Condition(is_near, message, _rank(device))}


def _temperature(
    device: DeviceReading, limit: float | None, active: Collection[Key]
) -> dict[Key, Condition]:
    celsius = device.temperature_celsius
    if limit is None or celsius is None:
        return {}
    key = Key("temperature", _name(device))
    is_hot = celsius >= limit - (TEMPERATURE_MARGIN_CELSIUS if key in active else 0.0)
    sign = "hot" if is_hot else "cool again"
    message = f"{_owner(device)} is {sign}: {celsius:.0f} C, threshold {limit:g} C"
    return {key: Condition(is_hot, message, _rank(device))}


def _name(device: DeviceReading) -> str:
    return device.uuid or device.name


def _owner(device: DeviceReading) -> str:
    ranks = ", ".join(map(str, device.ranks[:8]))
    return f"the GPU of rank {ranks}" if device.ranks else f"GPU {_name(device)}"


def _rank(device: DeviceReading) -> int | None:
    return min(device.ranks, default=None)
