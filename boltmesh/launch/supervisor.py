"""Starts the ranks of one host, monitors them, and prints in one line why they ended.

The supervisor imports neither torch nor Lightning: it takes a few megabytes, starts at once, and
stays alive when a rank crashes. Each rank is a process group of its own, so that only the
supervisor receives Ctrl-C, and the kernel ends it when the supervisor dies.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from boltmesh.errors import TelemetryError
from boltmesh.launch.rank import RENDEZVOUS_VARIABLE, SUPERVISOR_VARIABLE, stop_line, traceback_hint
from boltmesh.launch.stopping import HANDLED, STOPPING, describe_stop
from boltmesh.process import describe_exit, write_stderr
from boltmesh.rank_reports import Report, make_report_folder, read_reports, store_traceback
from boltmesh.telemetry.job import ID_VARIABLE, job_path, record_end

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
"""Signals from outside or from native code. Not SIGABRT: a rank that loses a peer may abort."""
_SEEN_LATE_NS = 500_000_000
"""Such a death precedes the errors that it causes, but polling sees it a little later."""

_HINTS: Mapping[int, str] = {
    signal.SIGKILL: "Often the system ran out of memory",
    signal.SIGBUS: "Often the shared memory of loader workers ran out",
}


@dataclass(frozen=True)
class RankExit:
    """Exit of a rank that the supervisor did not terminate."""

    rank: int
    pid: int
    code: int
    """Exit code of ``subprocess``: negative for a signal."""
    ended_ns: int
    """CLOCK_MONOTONIC at which the supervisor saw it."""


@dataclass(frozen=True)
class Cause:
    """The first rank that failed."""

    rank: int
    pid: int
    exit_code: int
    report: Report | None
    """None if it ended without a report."""


def first_cause(
    ends: Sequence[RankExit], reports: Mapping[int, Report], *, is_stopping: bool
) -> Cause | None:
    """Return the first rank that failed by itself; without one, the first that lost a peer.

    Args:
        ends: Exits of ranks that the supervisor did not terminate.
        reports: By rank.
        is_stopping: Whether a signal stops the ranks. Then a lost peer has only stopped a little
            earlier, and a rank without a report ended before it could write one: neither counts.
    """
    by_rank = {end.rank: end for end in ends}
    causes: list[tuple[int, Cause]] = []
    consequences: list[tuple[int, Cause]] = []
    for rank in sorted({*by_rank, *reports}):
        end, report = by_rank.get(rank), reports.get(rank)
        code = end.code if end is not None else 0
        if report is not None and report.kind in {"user", "failure", "consequence"}:
            which = consequences if report.kind == "consequence" else causes
            which.append((report.time_ns, Cause(rank, report.pid, code, report)))
        elif report is not None and report.kind in {"done", "stopped"}:
            continue
        elif end is not None:
            # Without a report it has not done its work, whatever its exit code.
            if is_stopping and -code not in _FROM_OUTSIDE:
                continue
            early = _SEEN_LATE_NS if -code in _FROM_OUTSIDE else 0
            causes.append((end.ended_ns - early, Cause(rank, end.pid, code, None)))
    if not causes and is_stopping:
        return None
    found = causes or consequences
    return min(found, key=lambda timed: timed[0])[1] if found else None


def describe_cause(cause: Cause, *, job_id: str) -> str:
    """Return one line: which rank failed, how, and where in its step."""
    report = cause.report
    if report is not None and report.kind == "user":
        return report.message
    who = f"rank {cause.rank} (pid {cause.pid})"
    where = where_it_was(job_id, cause.rank, cause.pid)
    if report is None:
        hint = _HINTS.get(-cause.exit_code)
        advice = f". {hint}: see `boltmesh top {job_id}`." if hint and where else "."
        if hint and not where:
            advice = f". {hint}."
        return (
            f"{who} {describe_exit(cause.exit_code)}{where}; nothing else failed before it{advice}"
        )
    if report.kind == "consequence":
        lost = "lost the connection to a peer"
        return f"{who} {lost}{where}, and no rank reported why: {report.message}"
    return f"{who} failed{where}: {report.message}"


def where_it_was(job_id: str, rank: int, pid: int) -> str:
    """Return `` in backward after step 41`` from telemetry; empty without it."""
    from boltmesh.telemetry.reader.reader import open_job

    try:
        with open_job(job_id) as job:
            ranks = job.snapshot().ranks  # perhaps of an earlier start
            found = next((seen for seen in ranks if (seen.rank, seen.pid) == (rank, pid)), None)
    except (TelemetryError, OSError):
        return ""
    if found is None:
        return ""
    return (f" in {found.phase}" if found.phase else "") + f" after step {found.global_step}"


POLL_S = 0.1
FAILED_GRACE_S = 2.0
"""Seconds that the other ranks have to fail by themselves after the first one."""
TERMINATE_GRACE_S = 2.0
STOPPED_GRACE_S = 15.0
"""Seconds that a rank has to stop after the first one stopped on a signal."""
LEAVING_GRACE_S = 60.0
"""Seconds that a rank has to exit after it reported its end, for loggers that upload."""


@dataclass
class _RankProcess:
    rank: int
    process: "subprocess.Popen[bytes]"
    ended_ns: int | None = None
    is_terminated: bool = False
    """Whether the supervisor ended it, so that its exit is not a cause."""

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def poll(self) -> None:
        if self.ended_ns is None and self.process.poll() is not None:
            self.ended_ns = time.monotonic_ns()

    def send_signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)

    def terminate(self) -> None:
        self.is_terminated = True
        self.send_signal(signal.SIGTERM)

    def kill_group(self) -> None:
        """End the rank and its loader workers."""
        self.is_terminated = self.is_terminated or self.code is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """Runs ``python -m boltmesh ARGUMENTS`` once per rank of this host.

    Args:
        arguments: The command line of every rank.
        num_ranks: Ranks to start.
        job_id: Id of the job in telemetry.
        wants_traceback: Print the traceback of the first failure.
        variables: Further variables of the ranks' environment.
    """

    after_failure: "Callable[[Supervisor], str] | None" = None
    """Called when the job has failed, not by the user; what it returns ends the line of the cause.
    Ranks that have ended are read, see ``run_folder``."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        num_ranks: int,
        job_id: str,
        wants_traceback: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.command = [sys.executable, "-m", "boltmesh", *arguments]
        self.resume_command = resume_command(arguments)
        self.num_ranks = num_ranks
        self.job_id = job_id
        self.wants_traceback = wants_traceback
        self._variables = dict(variables or {})
        self._folder = Path()
        self._ranks: list[_RankProcess] = []
        self._signals: list[int] = []
        self._reports: dict[int, Report] = {}
        self._has_recorded_death = False

    def run(self) -> int:
        """Start the ranks, wait for them, and return the exit code of the job."""
        self._folder = make_report_folder()
        try:
            with self._handled_signals():
                self._start()
                self._watch()
            self._reports = read_reports(self._folder)
            return self._conclude()
        finally:
            for rank in self._ranks:
                rank.kill_group()
                rank.process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _handled_signals(self) -> Iterator[None]:
        def record(signum: int, frame: FrameType | None) -> None:
            self._signals.append(signum)

        before = {signum: signal.getsignal(signum) for signum in HANDLED}
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(signum, record)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _start(self) -> None:
        # See Rank.serve_rendezvous for the use of the socket.
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as rendezvous:
            environment = self._environment(rendezvous.getsockname()[1])
            # Signals stay blocked in a rank until its handlers are installed, so that none ends it
            # with a traceback before that.
            signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
            try:
                for rank in range(self.num_ranks):
                    place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    descriptors = []
                    if rank == 0:
                        descriptors = [rendezvous.fileno()]
                        place[RENDEZVOUS_VARIABLE] = str(descriptors[0])
                    process = subprocess.Popen(  # noqa: S603 - this very program
                        self.command,
                        env={**environment, **place},
                        stdin=subprocess.DEVNULL,
                        pass_fds=descriptors,
                        start_new_session=True,
                    )
                    self._ranks.append(_RankProcess(rank, process))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def _environment(self, port: int) -> dict[str, str]:
        environment = {
            **os.environ,
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "NODE_RANK": "0",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            ID_VARIABLE: self.job_id,
            SUPERVISOR_VARIABLE: f"{os.getpid()}:{self._folder}",
            **self._variables,
        }
        # A rank that fails before the ranks have met would leave a C++ trace of each other one.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Every rank would otherwise start one thread per core of the machine.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // self.num_ranks)))
        if "PYTORCH_ALLOC_CONF" not in environment:
            # Gathered parameters of changing sizes would fragment a GPU's memory.
            environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if sys.platform.startswith("linux"):  # all ranks are on this host, whatever its name
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environment

    def _watch(self) -> None:
        """Return when every rank has ended, by itself or by force."""
        forwarded = 0
        ending_since: float | None = None
        while True:
            for rank in self._ranks:
                rank.poll()
            running = [rank for rank in self._ranks if rank.code is None]
            self._reports = read_reports(self._folder)
            self._record_death()
            if not running:
                return
            forwarded = self._forward_signals(running, forwarded)
            now = time.monotonic()
            if ending_since is None and self._is_ending():
                ending_since = now
            if ending_since is not None:
                waited = now - ending_since
                if not self._has_failed():
                    self._end_stragglers(running, waited)
                elif waited > FAILED_GRACE_S + TERMINATE_GRACE_S:
                    for rank in running:
                        rank.kill_group()
                elif waited > FAILED_GRACE_S:
                    for rank in running:
                        if not rank.is_terminated:
                            rank.terminate()
            time.sleep(POLL_S)

    def _forward_signals(self, running: Sequence[_RankProcess], forwarded: int) -> int:
        """Stop the ranks at the first signal, kill them at the second one."""
        received = len(self._signals)
        if forwarded == 0 and received:
            write_stderr(STOPPING)
            for rank in running:
                rank.send_signal(self._signals[0])
        if received > 1:
            for rank in running:
                rank.kill_group()
        return received

    def _record_death(self) -> None:
        """Record the first failing rank's exit code in telemetry if it could not do so itself.

        Another rank may report its lost peer before the supervisor sees the death, so this runs at
        every poll, the last one included.
        """
        if self._signals or self._has_recorded_death:
            return
        cause = self._first_cause()
        has_running = any(rank.code is None for rank in self._ranks)
        if cause is not None and cause.exit_code == 0 and has_running:
            return
        if cause is not None and cause.report is None:
            self._has_recorded_death = True
            with contextlib.suppress(TelemetryError):
                record_end(job_path(self.job_id), rank=cause.rank, exit_code=cause.exit_code)

    def _is_ending(self) -> bool:
        return (
            self._has_failed()
            or any(report.kind == "stopped" for report in self._reports.values())
            # The others wait for it, unless the user's code ends all of them like this.
            or any(rank.code == 0 and not self._has_left(rank.rank) for rank in self._ranks)
        )

    def _has_failed(self) -> bool:
        has_error = {"user", "failure", "consequence"}
        return any(report.kind in has_error for report in self._reports.values()) or any(
            rank.code and not self._has_left(rank.rank) for rank in self._ranks
        )

    def _has_left(self, rank: int) -> bool:
        """Return whether the rank reported that it completed its work.

        Errors after that do not fail the run, such as an abort of gloo's threads while the
        interpreter exits (pytorch#190489).
        """
        report = self._reports.get(rank)
        return report is not None and report.kind in {"done", "stopped"}

    def _end_stragglers(self, running: Sequence[_RankProcess], waited: float) -> None:
        for rank in running:
            patience = LEAVING_GRACE_S if self._has_left(rank.rank) else STOPPED_GRACE_S
            if waited > patience:
                rank.kill_group()

    # Results.

    @property
    def run_folder(self) -> Path | None:
        """The folder of the run as rank 0 has reported it."""
        report = self._reports.get(0)
        return None if report is None or report.run_folder is None else Path(report.run_folder)

    def _conclude(self) -> int:
        if len(self._signals) > 1:
            write_stderr(
                f"boltmesh: killed by a second signal; resume with: {self.resume_command}\n"
            )
            return 128 + self._signals[0]
        cause = self._first_cause()
        if cause is not None:
            return self._print_cause(cause)
        stopped = [report for report in self._reports.values() if report.kind == "stopped"]
        if stopped:
            kept = next((report for report in stopped if report.checkpoint is not None), stopped[0])
            write_stderr(
                f"boltmesh: {stop_line(kept.message, kept.checkpoint, self.resume_command)}\n"
            )
            return 128 + (self._signals or [kept.signum])[0]
        if all(rank.code == 0 or self._has_left(rank.rank) for rank in self._ranks):
            return 0
        signum = (self._signals or [signal.SIGTERM])[0]
        write_stderr(f"boltmesh: {stop_line(describe_stop(signum), None, self.resume_command)}\n")
        return 128 + signum

    def _first_cause(self) -> Cause | None:
        """Return the first rank that failed by itself, of those that have ended so far."""
        if not self._has_failed() and all(rank.code == 0 for rank in self._ranks):
            return None
        ends = [
            RankExit(rank.rank, rank.process.pid, rank.code, rank.ended_ns or 0)
            for rank in self._ranks
            if rank.code is not None and not rank.is_terminated
        ]
        return first_cause(ends, self._reports, is_stopping=bool(self._signals))

    def _print_cause(self, cause: Cause) -> int:
        stored = {rank: store_traceback(report) for rank, report in self._reports.items()}
        line = describe_cause(cause, job_id=self.job_id)
        if cause.report is not None:
            if self.wants_traceback:
                write_stderr(f"{cause.report.traceback}\n")
            if cause.report.kind != "user":
                path = stored[cause.rank]
                line += traceback_hint(path, wants_traceback=self.wants_traceback)
        is_user = cause.report is not None and cause.report.kind == "user"
        is_restarted = cause.report is None or cause.report.is_restarted
        if self.after_failure is not None and is_restarted and not (is_user or self._signals):
            line = f"{line.removesuffix('.')}; {self.after_failure(self)}"
        write_stderr(f"boltmesh: {line}\n")
        return 2 if is_user else 1


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command line that resumes the run of these arguments."""
    kept = [
        argument
        for argument in arguments
        if not argument.startswith(("resume=", "run.resume=")) and argument != "--traceback"
    ]
    return shlex.join(["boltmesh", *kept, "resume=auto"])
