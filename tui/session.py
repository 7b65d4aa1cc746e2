"""One job on the screen: its source, its state, and the choices of the user.

All screens of a job share one session. :meth:`Session.look` does all of the I/O and may run in a
thread; everything else belongs to the thread of the screen.
"""

import contextlib
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, TypeGuard

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.snapshot import Event
from boltmesh.tui.alerts.watch import Alert
from boltmesh.tui.sources.live import Observation, Source
from boltmesh.tui.state import State, fold, fold_loss_of_source
from boltmesh.tui.view import TableView, View

MAX_ALERTS = 256
WHOLE_JOB = -1
"""The rank of an event that concerns no rank in particular."""


class Watch(Protocol):
    """Compares one state after the other with thresholds, as AlertWatch does."""

    def update(self, state: State) -> tuple[Alert, ...]:
        """Return the alerts that are new."""


class Hook(Protocol):
    """Sends alerts elsewhere, besides showing them."""

    def send(self, alerts: Iterable[Alert]) -> None:
        """Take new alerts; returns at once."""

    def failures(self) -> tuple[Alert, ...]:
        """Return the failures since the last call."""


class Recording(Source, Protocol):
    """A source that can go to any moment of its recording."""

    speed: float

    @property
    def is_playing(self) -> bool:
        """Whether its clock runs."""

    @property
    def position(self) -> float:
        """The moment that is shown, seconds since 1970."""

    def play(self) -> None:
        """Let the clock run; from the beginning, if it is at the end."""

    def pause(self) -> None:
        """Stop the clock."""

    def span(self) -> tuple[float, float]:
        """Return the first and the last moment, seconds since 1970."""

    def seek(self, time: float) -> None:
        """Go to a moment; beyond the ends there is the nearest of them."""

    def step(self, by: int) -> None:
        """Stop, and go to another observation, counted from this one."""


class Lost(msgspec.Struct, frozen=True):
    """A look that saw nothing, and why."""

    reason: str


def is_recording(source: Source) -> TypeGuard[Recording]:
    """Say whether a source has a time that can be moved in."""
    return callable(getattr(source, "seek", None))


class Session:
    """Folds the observations of its source, and keeps the view while the screen is paused.

    Args:
        source: The job's source. It belongs to the session, which closes it.
        view: Earlier choices of the user, from the settings.
        watch: Raises alerts; None: there are none.
        hook: Receives the alerts too, and reports its own failures as alerts.
        other: A run that this one is compared with; it belongs to the session too.
    """

    def __init__(
        self,
        source: Source,
        *,
        view: View | None = None,
        watch: Watch | None = None,
        hook: Hook | None = None,
        other: Source | None = None,
    ) -> None:
        self.source = source
        self._other = other
        self._other_seen: Observation | None = None
        self._other_state: State | None = None
        self.view = view or View()
        self.waiting_for: str | None = None
        """Why nothing is known of the job yet, once a first look has failed."""
        self._watch = watch
        self._hook = hook
        self._alerts: deque[Event] = deque(maxlen=MAX_ALERTS)
        self._newest: State | None = None
        self._shown: State | None = None
        self._is_closed = False

    @property
    def state(self) -> State | None:
        """The state on the screen, frozen while paused. None before the first look."""
        return self._shown

    @property
    def recording(self) -> Recording | None:
        """The source, where one can move in its time."""
        return self.source if is_recording(self.source) else None

    def look(self) -> Observation | Lost:
        """Read the source; an error is part of the result."""
        self._look_at_other()
        try:
            return self.source.read()
        except (TelemetryError, OSError, ValueError) as error:
            # A source that was closed while a thread read it raises a ValueError.
            return Lost(str(error) or type(error).__name__)

    def _look_at_other(self) -> None:
        """Read the other run, once if it has ended; an unreadable one stays as it was."""
        known = self._other_seen
        if self._other is None or (known is not None and known.job.is_over):
            return
        with contextlib.suppress(TelemetryError, OSError, ValueError):
            self._other_seen = self._other.read()

    def take(self, seen: Observation | Lost) -> int:
        """Fold one look; return how many alerts should ring."""
        if isinstance(seen, Lost):
            if self._newest is None:
                self.waiting_for = seen.reason
                return 0
            self._newest = fold_loss_of_source(self._newest, seen.reason)
            num_alerts = 0
        else:
            state = self._with_other(fold(self._newest, seen))
            if seen.is_rewound:
                self._forget_alerts_after(seen.time)
            num_alerts = self._raise_alerts(state)
            self._newest = self._with_alerts(state)
            self.waiting_for = None
        if not self.view.is_paused or self._shown is None:
            self._shown = self._newest
        return num_alerts

    def _with_other(self, state: State) -> State:
        seen, known = self._other_seen, self._other_state
        if seen is None:
            return state
        if known is None or known.job is not seen.job:
            self._other_state = fold(known, seen)
        return msgspec.structs.replace(state, other=self._other_state)

    def choose(self, **changes: Any) -> None:
        """Change the view."""
        self.view = msgspec.structs.replace(self.view, **changes)

    def look_at_table(self, name: str, **changes: Any) -> TableView:
        """Change how one table is looked at, and return that."""
        table = msgspec.structs.replace(self.view.table(name), **changes)
        self.choose(tables={**self.view.tables, name: table})
        return table

    def toggle_pause(self) -> None:
        """Pause the screen or go on with the newest; a recording is paused or played instead."""
        recording = self.recording
        if recording is not None:
            (recording.pause if recording.is_playing else recording.play)()
            return
        self.choose(is_paused=not self.view.is_paused)
        if not self.view.is_paused:
            self._shown = self._newest

    def close(self) -> None:
        """Let go of the source, once."""
        if not self._is_closed:
            self._is_closed = True
            self.source.close()
            if self._other is not None:
                self._other.close()

    def _raise_alerts(self, state: State) -> int:
        """Record new alerts as events, and return how many should ring."""
        alerts = () if self._watch is None else self._watch.update(state)
        if self._hook is not None:
            self._hook.send(alerts)
            alerts += self._hook.failures()
        for alert in alerts:
            rank = WHOLE_JOB if alert.rank is None else alert.rank
            word = "alert is over" if alert.is_resolved else "alert"
            event = Event(alert.time, rank, "warning", f"{word}: {alert.message}")
            self._alerts.append(event)
        # The alerts of a recording happened long ago.
        is_now = self.recording is None
        return sum(not alert.is_resolved for alert in alerts) if is_now else 0

    def _forget_alerts_after(self, moment: float) -> None:
        kept = [event for event in self._alerts if event.time <= moment]
        self._alerts.clear()
        self._alerts.extend(kept)

    def _with_alerts(self, state: State) -> State:
        """Alerts are events of the viewer's own, and stand among those of the job."""
        if not self._alerts:
            return state
        events = sorted((*state.job.events, *self._alerts), key=lambda event: event.time)
        return msgspec.structs.replace(
            state, job=msgspec.structs.replace(state.job, events=tuple(events))
        )
