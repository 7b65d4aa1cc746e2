"""Starts the ranks of one host, watches them, and says in one line why they ended.

The supervisor imports neither torch nor Lightning: it costs a few megabytes, starts at once, and
keeps its head when a rank loses its own. Each rank is a process group of its own, so that Ctrl-C
reaches the supervisor alone, and asks the kernel to end it when the supervisor dies.

Which rank went first, and how to say it in one line: plain functions over ends and reports.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from boltmesh.errors import TelemetryError
from boltmesh.launch.rank import RENDEZVOUS_VARIABLE, SUPERVISOR_VARIABLE, stop_line, traceback_hint
from boltmesh.launch.reports import Report, read_reports, store_traceback
from boltmesh.launch.stopping import HANDLED, STOPPING, describe_stop
from boltmesh.process import describe_exit, write_stderr
from boltmesh.telemetry.job import ID_VARIABLE, job_path, record_end

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
"""What ends a rank from outside or in native code. Not SIGABRT: who loses a peer may abort."""
_SEEN_LATE_NS = 500_000_000
"""Such a death comes before the errors that it causes, and is seen by polling, a little later."""

_HINTS = {
    signal.SIGKILL: "Often the system ran out of memory",
    signal.SIGBUS: "Often the shared memory of loader workers ran out",
}


@dataclass(frozen=True)
class RankExit:
    """How a rank ended that nobody has ended."""

    rank: int
    pid: int
    code: int
    """As ``subprocess`` has it: negative for a signal."""
    ended_ns: int
    """CLOCK_MONOTONIC, when the supervisor saw it."""


@dataclass(frozen=True)
class Cause:
    """The rank that went first."""

    rank: int
    pid: int
    exit_code: int
    report: Report | None
    """None when it left without a word."""


def first_cause(
    ends: Sequence[RankExit], reports: Mapping[int, Report], *, was_asked_to_stop: bool
) -> Cause | None:
    """The rank that failed first by itself, or lost a peer when none did.

    When the ranks were asked to stop, a lost peer is one that stopped a little earlier, and a
    rank without a word was not yet able to say one: neither is a cause.
    """
    by_rank = {each.rank: each for each in ends}
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
        elif end is not None and code:
            if was_asked_to_stop and -code not in _FROM_OUTSIDE:
                continue
            early = _SEEN_LATE_NS if -code in _FROM_OUTSIDE else 0
            causes.append((end.ended_ns - early, Cause(rank, end.pid, code, None)))
    if not causes and was_asked_to_stop:
        return None
    found = causes or consequences
    return min(found, key=lambda each: each[0])[1] if found else None


def describe_cause(cause: Cause, *, job_id: str) -> str:
    """One line: which rank, how, and where it was in its step."""
    report = cause.report
    if report is not None and report.kind == "user":
        return report.message
    who = f"rank {cause.rank} (pid {cause.pid})"
    where = where_it_was(job_id, cause.rank)
    if report is None:
        hint = _HINTS.get(signal.Signals(-cause.exit_code)) if cause.exit_code < 0 else None
        advice = f". {hint}: see `boltmesh top {job_id}`." if hint and where else "."
        if hint and not where:
            advice = f". {hint}."
        return (
            f"{who} {describe_exit(cause.exit_code)}{where}; nothing else failed before it{advice}"
        )
    if report.kind == "consequence":
        return f"{who} lost a peer{where}, and no rank has said why: {report.message}"
    return f"{who} failed{where}: {report.message}"


def where_it_was(job_id: str, rank: int) -> str:
    """`` in backward after step 41``, as telemetry has it; empty when there is none."""
    from boltmesh.telemetry.reader.reader import open_job

    try:
        with open_job(job_id) as job:
            found = next((each for each in job.snapshot().ranks if each.rank == rank), None)
    except (TelemetryError, OSError):
        return ""
    if found is None:
        return ""
    return (f" in {found.phase}" if found.phase else "") + f" after step {found.global_step}"


POLL_S = 0.1
FAILED_GRACE_S = 2.0
"""How long the other ranks may take to fail by themselves, once one has."""
TERMINATE_GRACE_S = 2.0
STOPPED_GRACE_S = 15.0
"""How long a rank may take to follow the others, once one has stopped as it was asked to."""
LEAVING_GRACE_S = 60.0
"""How long a rank that has reported its end may take to leave, for loggers that upload."""


@dataclass
class _Started:
    rank: int
    process: "subprocess.Popen[bytes]"
    ended_ns: int | None = None
    is_being_ended: bool = False
    """Whether the supervisor has ended it, which makes its exit nobody's fault."""

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def poll(self) -> None:
        if self.ended_ns is None and self.process.poll() is not None:
            self.ended_ns = time.monotonic_ns()

    def ask_to_stop(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)

    def terminate(self) -> None:
        self.is_being_ended = True
        self.ask_to_stop(signal.SIGTERM)

    def kill_group(self) -> None:
        """End the rank and its loader workers."""
        self.is_being_ended = self.is_being_ended or self.code is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """Runs ``python -m boltmesh ARGUMENTS`` once per rank of this host.

    Args:
        arguments: The command line of every rank.
        num_ranks: How many to start.
        job_id: Under which telemetry keeps the job.
        wants_traceback: Print the traceback of the first failure.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        num_ranks: int,
        job_id: str,
        wants_traceback: bool = False,
    ) -> None:
        self.command = [sys.executable, "-m", "boltmesh", *arguments]
        self.resume_command = resume_command(arguments)
        self.num_ranks = num_ranks
        self.job_id = job_id
        self.wants_traceback = wants_traceback
        self._folder = Path()
        self._ranks: list[_Started] = []
        self._signals: list[int] = []
        self._reports: dict[int, Report] = {}
        self._has_recorded_death = False

    def run(self) -> int:
        """Start the ranks, wait for them, and return the exit code of the job."""
        self._folder = Path(tempfile.mkdtemp(prefix="boltmesh-ranks-"))
        try:
            with self._handled_signals():
                self._start()
                self._watch()
            self._reports = read_reports(self._folder)
            return self._conclude()
        finally:
            for each in self._ranks:
                each.kill_group()
                each.process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _handled_signals(self) -> Iterator[None]:
        def note(signum: int, frame: FrameType | None) -> None:
            self._signals.append(signum)

        before = {each: signal.getsignal(each) for each in HANDLED}
        for each, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(each, note)
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _start(self) -> None:
        # See Rank.serve_rendezvous for what becomes of the socket.
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as rendezvous:
            environment = self._environment(rendezvous.getsockname()[1])
            # A rank is born deaf to signals and listens once it has its handlers, so that none
            # arrives in between and ends it with a traceback.
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
                    self._ranks.append(_Started(rank, process))
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
        }
        # Every rank would otherwise start one thread per core of the machine.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // self.num_ranks)))
        if sys.platform.startswith("linux"):  # all ranks are on this host, whatever its name is
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environment

    def _watch(self) -> None:
        """Return when every rank has ended, by itself or by force."""
        forwarded = 0
        ending_since: float | None = None
        while True:
            for each in self._ranks:
                each.poll()
            running = [each for each in self._ranks if each.code is None]
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
                    for each in running:
                        each.kill_group()
                elif waited > FAILED_GRACE_S:
                    for each in running:
                        if not each.is_being_ended:
                            each.terminate()
            time.sleep(POLL_S)

    def _forward_signals(self, running: Sequence[_Started], forwarded: int) -> int:
        """The first signal asks the ranks to stop, the second one ends them."""
        received = len(self._signals)
        if forwarded == 0 and received:
            write_stderr(STOPPING)
            for each in running:
                each.ask_to_stop(self._signals[0])
        if received > 1:
            for each in running:
                each.kill_group()
        return received

    def _record_death(self) -> None:
        """Let the dashboard know of a rank that went first and could not record its own end.

        Another rank may have told of its lost peer before the death is seen, so that this is asked
        again at every look, up to the last.
        """
        if self._signals or self._has_recorded_death:
            return
        cause = self._first_cause()
        if cause is not None and cause.report is None:
            self._has_recorded_death = True
            with contextlib.suppress(TelemetryError):
                record_end(job_path(self.job_id), rank=cause.rank, exit_code=cause.exit_code)

    def _is_ending(self) -> bool:
        return self._has_failed() or any(each.kind == "stopped" for each in self._reports.values())

    def _has_failed(self) -> bool:
        has_error = {"user", "failure", "consequence"}
        return any(each.kind in has_error for each in self._reports.values()) or any(
            each.code and not self._has_left(each.rank) for each in self._ranks
        )

    def _has_left(self, rank: int) -> bool:
        """Whether the rank's own report says that it ended as it should.

        What happens to it after that, such as an abort of gloo's threads while the interpreter
        goes down (pytorch#190489), takes nothing away from the run.
        """
        report = self._reports.get(rank)
        return report is not None and report.kind in {"done", "stopped"}

    def _end_stragglers(self, running: Sequence[_Started], waited: float) -> None:
        for each in running:
            patience = LEAVING_GRACE_S if self._has_left(each.rank) else STOPPED_GRACE_S
            if waited > patience:
                each.kill_group()

    # Telling.

    def _conclude(self) -> int:
        if len(self._signals) > 1:
            write_stderr(
                f"boltmesh: killed by a second signal; go on with: {self.resume_command}\n"
            )
            return 128 + self._signals[0]
        cause = self._first_cause()
        if cause is not None:
            return self._tell_cause(cause)
        stopped = [each for each in self._reports.values() if each.kind == "stopped"]
        if stopped:
            kept = next((each for each in stopped if each.checkpoint is not None), stopped[0])
            write_stderr(
                f"boltmesh: {stop_line(kept.message, kept.checkpoint, self.resume_command)}\n"
            )
            return 128 + (self._signals or [kept.signum])[0]
        if all(each.code == 0 or self._has_left(each.rank) for each in self._ranks):
            return 0
        signum = (self._signals or [signal.SIGTERM])[0]
        write_stderr(f"boltmesh: {stop_line(describe_stop(signum), None, self.resume_command)}\n")
        return 128 + signum

    def _first_cause(self) -> Cause | None:
        """The rank that failed first by itself, of those that have ended so far."""
        ends = [
            RankExit(each.rank, each.process.pid, each.code, each.ended_ns or 0)
            for each in self._ranks
            if each.code is not None and not each.is_being_ended
        ]
        return first_cause(ends, self._reports, was_asked_to_stop=bool(self._signals))

    def _tell_cause(self, cause: Cause) -> int:
        stored = {rank: store_traceback(report) for rank, report in self._reports.items()}
        line = describe_cause(cause, job_id=self.job_id)
        if cause.report is not None:
            if self.wants_traceback:
                write_stderr(f"{cause.report.traceback}\n")
            if cause.report.kind != "user":
                path = stored[cause.rank]
                line += traceback_hint(path, wants_traceback=self.wants_traceback)
        write_stderr(f"boltmesh: {line}\n")
        return 2 if cause.report is not None and cause.report.kind == "user" else 1


def resume_command(arguments: Sequence[str]) -> str:
    """The command line that continues the run which these arguments have started."""
    kept = [
        each
        for each in arguments
        if not each.startswith(("resume=", "run.resume=")) and each != "--traceback"
    ]
    return shlex.join(["boltmesh", *kept, "resume=auto"])
