"""What a rank tells the process that started it: one small file, written whole or not at all.

A rank that fails says so before it unwinds, because unwinding may wait for peers that never come.
The one who started the ranks tells the cause from its consequences: when a rank goes, the others
lose a peer and fail with errors of their own, which say nothing about why.
"""

import os
import time
import traceback
from pathlib import Path
from typing import Literal

import msgspec

from boltmesh.errors import BoltMeshError
from boltmesh.telemetry.reader.cause import LOST_PEER

Kind = Literal["running", "done", "stopped", "user", "failure", "consequence"]
"""``user``: what a config or command line has to change. ``consequence``: a peer was lost."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The newest word of one rank."""

    rank: int
    pid: int
    kind: Kind
    time_ns: int
    """CLOCK_MONOTONIC, which all processes of a host share."""
    message: str = ""
    """One line."""
    traceback: str = ""
    run_folder: str | None = None
    checkpoint: str | None = None
    signum: int = 0
    """Which signal has stopped the rank."""


def describe_error(error: BaseException) -> str:
    """One line: the type and the message, or the message alone where it is boltmesh's own."""
    text = " ".join(str(error).split())
    if isinstance(error, BoltMeshError):
        return text
    name = type(error).__name__
    return f"{name}: {_shorten(text)}" if text else name


def _shorten(text: str, at_most: int = 400) -> str:
    return text if len(text) <= at_most else f"{text[:at_most]}..."


def kind_of_error(error: BaseException) -> Kind:
    """Whether the user can mend it, a peer was lost, or this rank failed by itself."""
    if isinstance(error, BoltMeshError):
        return "user" if error.exit_code == 2 else "failure"
    seen: BaseException | None = error
    while seen is not None:
        # gloo, NCCL and the store raise RuntimeErrors; an OSError is of this rank's own files.
        text = "" if isinstance(seen, OSError) else str(seen).lower()
        if any(sign in text for sign in LOST_PEER):
            return "consequence"
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "failure"


def report_of_error(error: BaseException, *, rank: int, run_folder: Path | None) -> Report:
    """The report of a rank that fails with this error."""
    return Report(
        rank=rank,
        pid=os.getpid(),
        kind=kind_of_error(error),
        time_ns=time.monotonic_ns(),
        message=describe_error(error),
        traceback="".join(traceback.format_exception(error)),
        run_folder=None if run_folder is None else str(run_folder),
    )


def write_report(folder: Path, report: Report) -> None:
    """Replace the rank's report."""
    path = folder / f"rank-{report.rank}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(report))
    temporary.replace(path)


def read_reports(folder: Path) -> dict[int, Report]:
    """The reports of all ranks that have written one, by rank."""
    reports = (
        msgspec.json.decode(path.read_bytes(), type=Report)
        for path in sorted(folder.glob("rank-*.json"))
    )
    return {report.rank: report for report in reports}


def store_traceback(report: Report) -> Path | None:
    """Keep a traceback in the run's folder and return where, or None when there is no folder."""
    if not report.traceback or report.run_folder is None:
        return None
    path = Path(report.run_folder, f"error-rank-{report.rank}.txt")
    try:
        path.write_text(report.traceback, encoding="utf-8")
    except OSError:
        return None
    return path
