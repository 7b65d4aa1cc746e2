"""Whether ranks that have failed are started again, when, and from which step.

Only what another try can change is tried again: not an error in a config (exit code 2), and not a
run that a signal stopped. A run ends when its budget is used, and when it failed twice with neither
a further step nor a newer checkpoint between.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from boltmesh.errors import TelemetryError
from boltmesh.launch.rank import CONTINUE_VARIABLE
from boltmesh.launch.stopping import StoppedBySignal, describe_stop
from boltmesh.launch.supervisor import Supervisor
from boltmesh.process import write_stderr
from boltmesh.telemetry.job import RESTARTED_BY_VARIABLE

FIRST_WAIT_S = 1.0
"""Seconds before the first restart; each further wait is twice as long."""
LONGEST_WAIT_S = 60.0
STEADY_S = 30.0
"""A start that ran for so many seconds resets the wait."""

FindCheckpoint = Callable[[Path], tuple[Path, int | None] | None]
"""Returns the newest checkpoint in the folder of a run, and the step after which it was saved."""


class Restarts:
    """Runs a job, and starts its ranks again after a failure.

    Args:
        most: Number of restarts.
        make: Makes the supervisor of one start. Its ranks get these further variables.
        find_checkpoint: See ``FindCheckpoint``.
    """

    def __init__(
        self,
        most: int,
        make: Callable[[dict[str, str]], Supervisor],
        find_checkpoint: FindCheckpoint,
    ) -> None:
        self._most = most
        self._make = make
        self._find_checkpoint = find_checkpoint
        self._num_restarts = 0
        self.run_folder: Path | None = None
        """Known once rank 0 has reported it."""
        self._started_s = 0.0
        self._next_wait_s = FIRST_WAIT_S
        self._wait_s: float | None = None
        """Seconds until the next start; None if there is none."""
        self._progress: tuple[int, int] | None = None
        """At the failure before: the furthest step, and when the newest checkpoint was written."""

    def run(self) -> int:
        """Run the job to its end, and return its exit code."""
        while True:
            supervisor = self._next_start()
            code = supervisor.run()
            self.run_folder = supervisor.run_folder or self.run_folder
            if self._wait_s is None:
                return code
            try:
                time.sleep(self._wait_s)
            except StoppedBySignal as stopped:
                name = describe_stop(stopped.signum).removesuffix(" before the first step")
                resume = supervisor.resume_command
                write_stderr(f"\nboltmesh: {name} before the restart; resume with: {resume}\n")
                return stopped.exit_code

    def _next_start(self) -> Supervisor:
        self._wait_s = None
        is_there = self.run_folder is not None and self.run_folder.is_dir()
        variables = {CONTINUE_VARIABLE: str(self.run_folder)} if is_there else {}
        if self._num_restarts < self._most:  # a failure of the last start is not waited out
            variables[RESTARTED_BY_VARIABLE] = str(os.getpid())
        supervisor = self._make(variables)
        supervisor.after_failure = self._decide
        self._started_s = time.monotonic()
        return supervisor

    def _decide(self, supervisor: Supervisor) -> str:
        """Say whether and when the ranks are started again after a failure."""
        self.run_folder = supervisor.run_folder or self.run_folder
        found = None if self.run_folder is None else self._find_checkpoint(self.run_folder)
        if self._num_restarts == self._most:
            return f"no restart is left of {self._most}; resume with: {supervisor.resume_command}"
        saved = 0 if found is None else found[0].stat().st_mtime_ns
        progress = furthest_step(supervisor.job_id), saved
        if self._progress is not None:
            step_before, saved_before = self._progress
            if progress[0] <= step_before and saved <= saved_before:
                return (
                    f"no further restart, because no step was gained since the failure before; "
                    f"resume with: {supervisor.resume_command}"
                )
            progress = max(progress[0], step_before), saved
        self._progress = progress
        if time.monotonic() - self._started_s > STEADY_S:
            self._next_wait_s = FIRST_WAIT_S
        self._wait_s = self._next_wait_s
        self._next_wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        self._num_restarts += 1
        start = "from the beginning, as there is no checkpoint yet"
        if found is not None:
            path, step = found
            start = f"from {path}" if step is None else f"from step {step} ({path})"
        return f"restart {self._num_restarts} of {self._most} in {self._wait_s:g} s {start}"


def furthest_step(job_id: str) -> int:
    """Return the furthest step of a job's ranks as telemetry has it; 0 without telemetry."""
    from boltmesh.telemetry.reader.reader import open_job

    try:
        with open_job(job_id) as job:
            return max((rank.global_step for rank in job.snapshot().ranks), default=0)
    except (TelemetryError, OSError):
        return 0
