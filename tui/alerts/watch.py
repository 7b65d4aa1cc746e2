"""Alerts on a job: rules with thresholds, evaluated once per look; deterministic, no I/O.

The thresholds come from the job (``alerts:`` of its config). What happens with an alert is the
viewer's choice: a line among the events, the bell, a command (``hook.py``).

An alert is raised once, when its condition begins to hold, and resolved once, when the condition
no longer holds. A value that is not known at the moment changes nothing. Where a value wavers
around its threshold, a raised alert stays until the value is clear of it.
"""

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import RankSnapshot, StepRecord
from boltmesh.tui import units
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.step_time import INTERRUPTIONS, working_seconds
from boltmesh.tui.state import State

MEMORY_MARGIN = 0.02
"""Share of the memory by which a device has to be below the threshold again."""
TEMPERATURE_MARGIN_CELSIUS = 3.0

_FIRST_RANK = re.compile(r"rank (\d{1,9})\b")

RuleKind = Literal["loss", "throughput", "memory", "temperature", "stall", "failed"]


class Key(NamedTuple):
    """Identity of an alert: two alerts with the same key are one."""

    kind: RuleKind
    about: str = ""
    """The device, for kinds that several devices can raise."""


class Condition(msgspec.Struct, frozen=True):
    """The answer of a rule."""

    holds: bool
    message: str
    rank: int | None = None


Rule = Callable[[State, Collection[Key]], Mapping[Key, Condition]]
"""From the state and the raised alerts, conditions by alert; a missing alert is unknown."""


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
    """The job failed or crashed while it was watched; one that was dead before raises nothing."""

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


WARM_UP = 10
"""Batches at the beginning that say nothing about the pace: compiling, filling caches."""
WINDOW = 10
"""Batches over which a rate is taken; the slowest is left out, for an epoch begins with one."""
MIN_WINDOWS = 4
"""Rates that have to be known before one can be low."""
MAX_WINDOWS = 2048
"""Rates that are kept; beyond it every second one of the older half goes."""
MARGIN = 0.05
"""Share of the threshold by which the rate has to be above it again."""

_Unit = Literal["tokens", "samples", "batches"]


class ThroughputRule:
    """The rate of the newest batches has lost a share of the median so far.

    Taken from the batches of one rank: in synchronous training all keep the same pace. Time spent
    in validation and checkpoints does not count. The median is frozen while the alert is raised,
    so that a slow stretch does not become the norm.
    """

    def __init__(self) -> None:
        self._forget(None)

    def _forget(self, rank: int | None) -> None:
        self._rank = rank
        self._newest = -1
        self._num_seen = 0
        self._recent: deque[StepRecord] = deque(maxlen=WINDOW)
        self._waiting: list[StepRecord] = []
        self._rates: list[float] = []
        self._unit: _Unit | None = None

    def __call__(self, state: State, active: Collection[Key]) -> Mapping[Key, Condition]:
        """Return the verdict, once enough batches were seen."""
        share, key = state.job.alerts.throughput_drop, Key("throughput")
        rank = next((rank for rank in state.job.ranks if rank.steps), None)
        if share is None or rank is None or state.job.state != "running":
            return {}
        if not self._take(rank, is_raised=key in active):
            return {}
        now, usual = _rate(self._recent, self._unit), self._usual()
        if now is None or usual is None:
            return {}
        limit = (1 - share) * usual
        is_low = now < limit * (1 + MARGIN if key in active else 1.0)
        rates = f"{units.rate(now)} {self._unit}/s, median so far {units.rate(usual)}, on rank"
        sign = f"{1 - now / usual:.0%} down" if is_low else "up again"
        return {key: Condition(is_low, f"throughput is {sign}: {rates} {rank.rank}", rank.rank)}

    def _take(self, rank: RankSnapshot, *, is_raised: bool) -> bool:
        """Add the batches that are new; tell whether there were any."""
        if rank.rank != self._rank:
            self._forget(rank.rank)
        fresh = []
        for step in reversed(rank.steps):
            if step.index <= self._newest:
                break
            fresh.append(step)
        for step in reversed(fresh):
            self._newest = step.index
            self._num_seen += 1
            if self._num_seen > WARM_UP:
                self._add(step, is_raised=is_raised)
        return bool(fresh)

    def _add(self, step: StepRecord, *, is_raised: bool) -> None:
        self._unit = self._unit or _unit_of(step)
        if len(self._recent) == WINDOW and not is_raised:
            # A step that leaves the newest window joins the past that the window is compared with.
            self._waiting.append(self._recent[0])
            if len(self._waiting) == WINDOW:
                rate = _rate(self._waiting, self._unit)
                self._rates += [] if rate is None else [rate]
                self._waiting = []
        self._recent.append(step)

    def _usual(self) -> float | None:
        if len(self._rates) > MAX_WINDOWS:
            half = len(self._rates) // 2
            self._rates = self._rates[:half:2] + self._rates[half:]
        return statistics.median(self._rates) if len(self._rates) >= MIN_WINDOWS else None


class StallRule:
    """No rank has ended a step for a while, and none is in validation or writes a checkpoint."""

    def __init__(self) -> None:
        self._global_step: int | None = None
        self._moved = 0.0

    def __call__(self, state: State, active: Collection[Key]) -> Mapping[Key, Condition]:
        """Return the verdict; before the first step the time counts from the job's start."""
        job, limit = state.job, state.job.alerts.stall_s
        if limit is None or job.state != "running":
            return {}
        ended = max((rank.steps[-1].end_time for rank in job.ranks if rank.steps), default=0.0)
        moved = max(ended, job.started)
        if moved > state.time:  # the clock was set back: what is ahead counts from the first look
            moved = self._moved or state.time
        moved = max(moved, self._moved)
        has_moved = self._global_step is not None and job.global_step != self._global_step
        if has_moved or any(
            rank.phase in INTERRUPTIONS for rank in job.ranks if rank.state == "running"
        ):
            # Ranks of other hosts may be known by their step alone.
            moved = max(moved, state.time)
        before, self._moved, self._global_step = self._moved, moved, job.global_step
        still_s = state.time - moved
        if still_s < limit:
            stood_s = max(0.0, moved - before) if before else 0.0
            message = f"training moves on after {units.duration(stood_s)}"
            return {Key("stall"): Condition(False, message)}
        where = ", ".join(sorted({rank.phase for rank in job.ranks if rank.phase}))
        since = f"since step {job.global_step:,}" if job.global_step else "since the start"
        place = f"; ranks are in {where}" if where else ""
        message = f"no step for {units.duration(still_s)} {since}{place}"
        return {Key("stall"): Condition(True, message)}


def _unit_of(step: StepRecord) -> _Unit:
    return "tokens" if step.tokens else "samples" if step.samples else "batches"


def _rate(steps: Collection[StepRecord], unit: _Unit | None) -> float | None:
    """Return the items a second of all batches but the slowest."""
    if len(steps) < WINDOW or unit is None:
        return None
    counted = sorted(steps, key=working_seconds)[:-1]
    seconds = sum(map(working_seconds, counted))
    amount = sum(1 if unit == "batches" else getattr(step, unit) or 0 for step in counted)
    return amount / seconds if seconds > 0 and amount > 0 else None


AlertKind = Literal["loss", "throughput", "memory", "temperature", "stall", "failed", "hook"]
"""``hook``: the viewer's own command did not do what it should."""


class Alert(msgspec.Struct, frozen=True):
    """One notice, of a condition that began or ended."""

    time: float
    """When the watcher saw it: the time of the look, seconds since 1970."""
    job: str
    """The job's id."""
    name: str
    """The job's name."""
    kind: AlertKind
    message: str
    rank: int | None = None
    """The rank concerned, the lowest of several; None for the whole job."""
    is_resolved: bool = False
    """The condition no longer holds."""


class AlertWatch:
    """Evaluates the alert rules on each new state of one job, and returns what changed.

    Another job, another run under the same id, or a state from before the last one (a recording
    that was rewound) starts afresh.
    """

    def __init__(self) -> None:
        self._about: tuple[str, float] | None = None
        self._time = 0.0
        self._forget()

    @property
    def active(self) -> tuple[Alert, ...]:
        """The alerts that were raised and not yet resolved, the oldest first."""
        return tuple(self._active.values())

    def update(self, state: State) -> tuple[Alert, ...]:
        """Return the alerts that this look raises or resolves, in the order of the rules."""
        about = (state.job.id, state.job.started)
        if about != self._about or state.time < self._time:
            self._forget()
        self._about, self._time = about, state.time
        found: dict[Key, Condition | None] = {}
        for rule in self._rules:
            found |= rule(state, self._active.keys())
        return tuple(
            alert
            for key in [*self._active, *(key for key in found if key not in self._active)]
            if (alert := self._change(key, found.get(key), state, is_known=key in found))
        )

    def _forget(self) -> None:
        self._active: dict[Key, Alert] = {}
        self._rules: tuple[Rule, ...] = (
            LossRule(),
            ThroughputRule(),
            look_at_devices,
            StallRule(),
            FailureRule(),
        )

    def _change(
        self, key: Key, condition: Condition | None, state: State, *, is_known: bool
    ) -> Alert | None:
        raised = self._active.get(key)
        if condition is not None and condition.holds:
            if raised is not None:
                return None
            self._active[key] = _alert(key, condition, state)
            return self._active[key]
        if raised is None:
            return None
        has_ended = state.job.state != "running" and key.kind != "failed"
        if has_ended and (condition is None or not is_known):
            condition = Condition(holds=False, message=f"the job has {_ended(state)}")
        if condition is None:
            return None
        del self._active[key]
        return msgspec.structs.replace(_alert(key, condition, state), is_resolved=True)


def _ended(state: State) -> str:
    return "ended" if state.job.state == "finished" else state.job.state


def _alert(key: Key, condition: Condition, state: State) -> Alert:
    return Alert(
        time=state.time,
        job=clean(state.job.id, 64),
        name=clean(state.job.name, 100),
        kind=key.kind,
        message=clean(condition.message),
        rank=condition.rank,
    )
