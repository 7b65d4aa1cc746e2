"""Runs the viewer's own command for each alert, in the background.

The command is the viewer's (``--on-alert``), never the job's. It is one argument of
``/bin/sh -c`` and is passed on as written: text of the job reaches it only as values of
environment variables and as JSON on its standard input, so no text of a job becomes part of a
command line.
"""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from boltmesh.telemetry.sanitize import clean
from boltmesh.tui.alerts.watch import Alert, AlertWatch
from boltmesh.tui.sanitize import clean_json
from boltmesh.tui.state import State

TIMEOUT_S = 30.0
"""A command that takes longer is ended, with all that it started."""
MAX_RUNS = 10
WINDOW_S = 60.0
"""At most ``MAX_RUNS`` begin within any such time; further runs are dropped and counted."""
MAX_WAITING = 64
CLOSE_S = 5.0

SCHEMA = 1


class AlertHook:
    """Runs a command for alerts, one after the other, on a thread of its own.

    Args:
        command: For ``/bin/sh``.
        clock: Seconds that only go forward; the rate is limited by it.
    """

    def __init__(
        self,
        command: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = command
        self._clock = clock
        self._waiting: queue.SimpleQueue[Alert | None] = queue.SimpleQueue()
        self._failures: deque[Alert] = deque(maxlen=MAX_WAITING)
        self._begun: deque[float] = deque(maxlen=MAX_RUNS)
        self._num_dropped = 0
        self._last_dropped: Alert | None = None
        self._run: HookRun | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def send(self, alerts: Iterable[Alert]) -> None:
        """Have the command run for each alert; returns at once."""
        for alert in alerts:
            now = self._clock()
            is_full = len(self._begun) == MAX_RUNS and now - self._begun[0] < WINDOW_S
            if is_full or self._waiting.qsize() >= MAX_WAITING or self._is_closing:
                self._num_dropped += 1
                self._last_dropped = alert
                continue
            self._begun.append(now)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="boltmesh-on-alert", daemon=True
                )
                self._thread.start()
            self._waiting.put(alert)

    def failures(self) -> tuple[Alert, ...]:
        """Return the failures since the last call, as alerts of the kind ``hook``."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._failures.popleft())
        if self._num_dropped and self._last_dropped is not None:
            many = f"{self._num_dropped} alerts" if self._num_dropped > 1 else "an alert"
            message = f"the command was not run for {many}: at most {MAX_RUNS} in {WINDOW_S:.0f} s"
            found.append(_failure(self._last_dropped, message))
            self._num_dropped = 0
        return tuple(found)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Let the runs that wait finish for a while, and end the one that still goes then."""
        self._is_closing = True
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(wait_s)
        if self._thread.is_alive() and self._run is not None:
            self._run.kill()

    def _work(self) -> None:
        while (alert := self._waiting.get()) is not None:
            self._run = HookRun(self._command, alert)
            problem = self._run.finish(TIMEOUT_S)
            if problem is not None:
                self._failures.append(_failure(alert, problem))


class HookRun:
    """One run of the command, which begins at once.

    Args:
        command: For ``/bin/sh``.
        alert: Passed to the command in its environment and, as JSON, on its standard input.
    """

    def __init__(self, command: str, alert: Alert) -> None:
        self._alert = alert
        self._problem: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            # A session of its own: a Ctrl-C at the viewer is not meant for it, and all of its
            # processes can be ended together.
            self._process = subprocess.Popen(  # noqa: S603 - the viewer's own command
                ["/bin/sh", "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=os.environ | _environment(alert),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._problem = f"the command cannot be run: {clean(error)}"

    def finish(self, timeout_s: float) -> str | None:
        """Wait for the end.

        Returns:
            None when it exits with 0, else what went wrong, in one line.
        """
        process = self._process
        if process is None:
            return self._problem
        try:
            _, said = process.communicate(_document(self._alert), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1.0)
            return f"the command did not end within {timeout_s:g} s and was ended"
        if process.returncode == 0:
            return None
        how = f"code {process.returncode}"
        if process.returncode < 0:
            how = f"signal {-process.returncode}"
            with contextlib.suppress(ValueError):  # real-time signals have no name
                how = signal.Signals(-process.returncode).name
        last = clean(said.decode("utf-8", "replace").strip().rpartition("\n")[2], 200)
        return f"the command ended with {how}" + (f": {last}" if last else "")

    def kill(self) -> None:
        """Kill the command and its child processes."""
        if self._process is not None:
            # The group outlives its leader while a child of the command still runs.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _environment(alert: Alert) -> dict[str, str]:
    return {
        "BOLTMESH_ALERT_KIND": alert.kind,
        "BOLTMESH_ALERT_STATE": "resolved" if alert.is_resolved else "raised",
        "BOLTMESH_ALERT_MESSAGE": clean(alert.message),
        "BOLTMESH_ALERT_JOB": clean(alert.job),
        "BOLTMESH_ALERT_NAME": clean(alert.name),
        "BOLTMESH_ALERT_RANK": "" if alert.rank is None else str(alert.rank),
    }


def _document(alert: Alert) -> bytes:
    fields = msgspec.structs.asdict(alert)
    return clean_json(msgspec.json.encode({"schema": SCHEMA, **fields})).encode() + b"\n"


def _failure(alert: Alert, message: str) -> Alert:
    return msgspec.structs.replace(
        alert,
        time=time.time(),
        kind="hook",
        message=f"--on-alert: {message}",
        rank=None,
        is_resolved=False,
    )


class HeadlessAlerts:
    """Prints alerts as lines, without a screen, and runs the command for each.

    Args:
        command: Run for each alert, for ``/bin/sh``.
        say: Prints one line.
    """

    def __init__(self, command: str, *, say: Callable[[str], None]) -> None:
        self._watch = AlertWatch()
        self._hook = AlertHook(command)
        self._say = say

    def take(self, state: State) -> None:
        """Take one more state of the job."""
        alerts = self._watch.update(state)
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
