"""Watches a job for what its owner wants to be told: deterministic, without I/O.

The thresholds come from the job (``alerts:`` of its config). What is done about an alert is the
viewer's: a line among the events, the bell, a command (``hook.py``).

An alert is raised once, when its condition begins to hold, and resolved once, when the condition
no longer holds. A figure that is not known at the moment changes nothing.
"""

from typing import Literal

import msgspec

from boltmesh.telemetry.sanitize import clean
from boltmesh.tui.alerts.rules import (
    Condition,
    FailureRule,
    Key,
    LossRule,
    Rule,
    StallRule,
    ThroughputRule,
    look_at_devices,
)
from boltmesh.tui.state import State

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
    """The rank that it is about, the lowest of several; None where it is the whole job's."""
    is_resolved: bool = False
    """The condition no longer holds."""


class AlertWatch:
    """Looks at one job again and again, and tells what is new.

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
