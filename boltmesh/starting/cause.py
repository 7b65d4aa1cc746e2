"""Which rank went first, and how to say it in one line: plain functions over ends and reports."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from boltmesh.errors import TelemetryError
from boltmesh.process import describe_exit
from boltmesh.starting.reports import Report

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
"""What ends a rank from outside or in native code. Not SIGABRT: who loses a peer may abort."""
_SEEN_LATE_NS = 500_000_000
"""Such a death comes before the errors that it causes, and is seen by polling, a little later."""

_HINTS = {
    signal.SIGKILL: "Often the system ran out of memory",
    signal.SIGBUS: "Often the shared memory of loader workers ran out",
}


@dataclass(frozen=True)
class RankEnd:
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
    ends: Sequence[RankEnd], reports: Mapping[int, Report], *, was_asked_to_stop: bool
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
    from boltmesh.telemetry.reading.reader import open_job

    try:
        with open_job(job_id) as job:
            found = next((each for each in job.snapshot().ranks if each.rank == rank), None)
    except (TelemetryError, OSError):
        return ""
    if found is None:
        return ""
    return (f" in {found.phase}" if found.phase else "") + f" after step {found.global_step}"
