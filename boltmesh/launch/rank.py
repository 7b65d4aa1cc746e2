"""This process as one rank: its launcher, its reports, and its exit code.

A rank is started by boltmesh's supervisor (``supervisor.py``), which reads reports, by a launcher
such as torchrun, which reads exit codes, or by a user, for a run of one rank.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from boltmesh.errors import BoltMeshError
from boltmesh.launch.placement import Launcher, find_launcher
from boltmesh.launch.stopping import SAME_SIGNAL_S, StoppedBySignal, StopSwitch
from boltmesh.process import end_with_parent, write_stderr
from boltmesh.rank_reports import Kind, Report, report_of_error, store_traceback, write_report
from boltmesh.run_lock import RunLock
from boltmesh.telemetry.writer.output import keep_lines

SUPERVISOR_VARIABLE = "BOLTMESH_SUPERVISOR"
"""``PID:FOLDER`` of the supervisor, for its ranks."""
RENDEZVOUS_VARIABLE = "BOLTMESH_RENDEZVOUS_FD"
"""The listening socket that rank 0 inherits."""
CONTINUE_VARIABLE = "BOLTMESH_CONTINUED_RUN"
"""The folder of the run that ranks continue after a restart by the supervisor."""


@dataclass
class Rank:
    """This process as a rank of its job, and the state of its run."""

    launcher: Launcher | None
    supervisor_folder: Path | None
    stop: StopSwitch
    continued: Path | None = None
    """The folder of the run that this rank continues after a failure."""
    run_folder: Path | None = None
    run_lock: RunLock | None = None
    """The lock of the run's folder, on rank 0."""
    checkpoint: str | None = None
    resume_command: str = ""
    wants_traceback: bool = False
    _reported: BaseException | None = field(default=None, repr=False)
    _rendezvous: Any = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        """Global rank; 0 without a launcher."""
        return 0 if self.launcher is None else self.launcher.rank

    @property
    def is_supervised(self) -> bool:
        """Whether boltmesh's supervisor prints for this rank."""
        return self.supervisor_folder is not None

    @classmethod
    def attach(cls) -> "Rank":
        """Attach this process to its job: handle signals, and end with the supervisor."""
        launcher = find_launcher(os.environ)
        folder = _supervisor_folder()
        stop = StopSwitch(
            is_supervised=folder is not None,
            same_signal_s=0.0 if launcher is None else SAME_SIGNAL_S,
        )
        stop.install()
        continued = os.environ.get(CONTINUE_VARIABLE)
        return cls(launcher, folder, stop, None if continued is None else Path(continued))

    def serve_rendezvous(self) -> None:
        """Serve the rendezvous store on rank 0 of a supervisor, on the supervisor's port.

        The supervisor listens before any rank exists and passes the socket on, so no other process
        can take the port in between. torch finds this store when it makes the process group,
        because stores of one process and port share their server.
        """
        inherited = os.environ.pop(RENDEZVOUS_VARIABLE, None)
        if inherited is None:
            return
        from datetime import timedelta

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._rendezvous = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=True,
            timeout=timedelta(seconds=300),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=int(inherited),
        )

    def report(self, kind: Kind, *, message: str = "", signum: int = 0) -> None:
        """Write a report for the supervisor, if there is one."""
        if self.supervisor_folder is not None:
            report = Report(
                rank=self.rank,
                pid=os.getpid(),
                kind=kind,
                time_ns=time.monotonic_ns(),
                message=message,
                run_folder=None if self.run_folder is None else str(self.run_folder),
                checkpoint=self.checkpoint,
                signum=signum,
            )
            write_report(self.supervisor_folder, report)

    def report_error(self, error: BaseException) -> None:
        """Report an error now, before anything unwinds; the first one stays."""
        if self._reported is not None or isinstance(error, StoppedBySignal):
            return
        self._reported = error
        if self.supervisor_folder is not None:
            report = report_of_error(error, rank=self.rank, run_folder=self.run_folder)
            write_report(self.supervisor_folder, report)

    def run(self, work: Callable[[], int]) -> int:
        """Run ``work``, report how it ended, and return the exit code."""
        try:
            self.stop.unblock()
            code = work()
        except StoppedBySignal as stopped:
            self.checkpoint = stopped.checkpoint
            self.report("stopped", message=str(stopped), signum=stopped.signum)
            if not self.is_supervised and self.rank == 0:
                self._print(stop_line(str(stopped), stopped.checkpoint, self.resume_command))
            return stopped.exit_code
        except SystemExit as left:
            # Lightning exits by itself after a KeyboardInterrupt that user code raised.
            return left.code if isinstance(left.code, int) else 1
        except BaseException as error:  # noqa: BLE001 - reported with its traceback
            return self._fail(error)
        self.report("done")
        return code

    def _fail(self, error: BaseException) -> int:
        self.report_error(error)
        assert self._reported is not None
        report = report_of_error(self._reported, rank=self.rank, run_folder=self.run_folder)
        with contextlib.suppress(Exception):  # a supervisor prints it, in a process of its own
            keep_lines(report.traceback)
        if not self.is_supervised:
            self._print_failure(report)
        return self._reported.exit_code if isinstance(self._reported, BoltMeshError) else 1

    def _print_failure(self, report: Report) -> None:
        """Print one line per host for an error of the user, one per rank for other failures."""
        is_first_here = self.launcher is None or self.launcher.local_rank == 0
        if report.kind == "user" and not is_first_here:
            return
        if self.wants_traceback:
            sys.stdout.flush()
            write_stderr(f"{report.traceback}\n")
        line = report.message
        if report.kind == "consequence" and self.launcher is not None:
            line = "connection to a peer was lost; see the first failing rank above"
        if report.kind != "user":
            line = line if self.launcher is None else f"rank {self.rank}{_verb(report)}: {line}"
            line += traceback_hint(store_traceback(report), wants_traceback=self.wants_traceback)
        self._print(line)

    @staticmethod
    def _print(line: str) -> None:
        sys.stdout.flush()
        write_stderr(f"boltmesh: {line}\n")


def _verb(report: Report) -> str:
    return "" if report.kind == "consequence" else " failed"


def stop_line(message: str, checkpoint: str | None, resume_command: str) -> str:
    """Return the line for a stopped run: its checkpoint and the command that resumes it."""
    if checkpoint is None:
        return f"{message}; no checkpoint was written for it."
    return f"{message}; checkpoint: {checkpoint}; resume with: {resume_command}"


def traceback_hint(path: Path | None, *, wants_traceback: bool) -> str:
    """Return the end of the line for a failure: where the traceback is."""
    if path is not None:
        return f"; traceback: {path}"
    return "" if wants_traceback else "; add --traceback to see where"


def _supervisor_folder() -> Path | None:
    value = os.environ.get(SUPERVISOR_VARIABLE)
    if value is None:
        return None
    pid, _, folder = value.partition(":")
    if int(pid) != os.getppid():  # it was killed before this rank could follow it
        os.kill(os.getpid(), signal.SIGKILL)
    end_with_parent()
    return Path(folder)
