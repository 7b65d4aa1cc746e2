"""Watches for alerts where there is no screen: says each on stderr and runs the command for it."""

from collections.abc import Callable

from boltmesh.tui.alerts.hook import AlertHook
from boltmesh.tui.alerts.watch import AlertWatch
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import State, fold


class Watchman:
    """Folds what a source sees and tells what is new.

    Args:
        command: Run for each alert, for ``/bin/sh``.
        say: Takes one line for people.
    """

    def __init__(self, command: str, *, say: Callable[[str], None]) -> None:
        self._watch = AlertWatch()
        self._hook = AlertHook(command)
        self._say = say
        self._state: State | None = None

    def look(self, seen: Observation) -> None:
        """Take one more observation."""
        self._state = fold(self._state, seen)
        alerts = self._watch.update(self._state)
        for alert in alerts:
            word = "alert is over" if alert.is_resolved else "alert"
            self._say(f"{word}: {alert.message}")
        self._hook.send(alerts)
        self._say_failures()

    def close(self) -> None:
        """Wait a while for the commands that still run."""
        self._hook.close()
        self._say_failures()

    def _say_failures(self) -> None:
        for failure in self._hook.failures():
            self._say(failure.message)
