"""The report of a rank to its supervisor: one small file, replaced atomically.

A rank that fails writes its report before it unwinds, because unwinding may wait for peers that
never come. The supervisor separates the cause from its consequences: after the first failure the
other ranks lose the connection to a peer, and their own errors do not say why.
"""

import contextlib
import os
import shutil
import tempfile
import time
import traceback
from pathlib import Path
from typing import Literal

import msgspec

from boltmesh.errors import BoltMeshError
from boltmesh.process import ProcessId, encodable, without_control
from boltmesh.telemetry.reader.cause import LOST_PEER
from boltmesh.telemetry.redaction import holds_secret

Kind = Literal["running", "done", "stopped", "user", "failure", "consequence"]
"""``user``: an error in a config or command line. ``consequence``: a peer was lost."""


_FOLDERS = "boltmesh-ranks-"
"""Begins the names of folders in which ranks write reports; the process that made it follows."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The newest report of one rank."""

    rank: int
    pid: int
    kind: Kind
    time_ns: int
    """CLOCK_MONOTONIC, shared by all processes of a host."""
    message: str = ""
    """One line."""
    traceback: str = ""
    run_folder: str | None = None
    checkpoint: str | None = None
    is_restarted: bool = True
    """Whether ranks may be started again after this failure."""
    signum: int = 0
    """The signal that stopped the rank; 0 for none."""


def make_report_folder() -> Path:
    """Make a folder for the reports of the ranks that this process starts.

    Folders that killed processes of this user have left are deleted.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*-*-*-*"):
        machine, pid, started, _ = folder.name.removeprefix(_FOLDERS).split("-", 3)
        if not (pid.isdecimal() and started.isdecimal()):
            continue
        with contextlib.suppress(OSError):
            is_own = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
            if is_own and ProcessId(machine, int(pid), int(started)).has_ended():
                shutil.rmtree(folder)
    own = ProcessId.own()
    prefix = f"{_FOLDERS}{own.machine}-{own.pid}-{own.started}-"
    return Path(tempfile.mkdtemp(prefix=prefix))


def describe_error(error: BaseException) -> str:
    """Return one line: class and message; of boltmesh's own errors the message only."""
    text = " ".join(without_control(_text(error)).split())
    if isinstance(error, BoltMeshError):
        return text
    name = type(error).__name__
    return f"{name}: {_shorten(text)}" if text else name


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's class; its name says something
        return ""


def _shorten(text: str, at_most: int = 400) -> str:
    return text if len(text) <= at_most else f"{text[:at_most]}..."


def kind_of_error(error: BaseException) -> Kind:
    """Return whether the user can fix it, a peer was lost, or this rank failed by itself."""
    if isinstance(error, BoltMeshError):
        return "user" if error.exit_code == 2 else "failure"
    seen: BaseException | None = error
    while seen is not None:
        # gloo, NCCL and the store raise RuntimeErrors; an OSError comes from this rank's own files.
        text = "" if isinstance(seen, OSError) else _text(seen).lower()
        if any(sign in text for sign in LOST_PEER):
            return "consequence"
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "failure"


def report_of_error(error: BaseException, *, rank: int, run_folder: Path | None) -> Report:
    """Return the report of a rank that fails with this error."""
    return Report(
        rank=rank,
        pid=os.getpid(),
        kind=kind_of_error(error),
        time_ns=time.monotonic_ns(),
        message=describe_error(error),
        traceback=encodable("".join(traceback.format_exception(error))),
        run_folder=None if run_folder is None else str(run_folder),
        is_restarted=not isinstance(error, BoltMeshError) or error.is_restarted,
    )


def write_report(folder: Path, report: Report) -> None:
    """Replace the rank's report."""
    texts = {
        name: encodable(value)
        for name, value in msgspec.structs.asdict(report).items()
        if isinstance(value, str)
    }
    report = msgspec.structs.replace(report, **texts)
    path = folder / f"rank-{report.rank}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(report))
    temporary.replace(path)


def read_reports(folder: Path) -> dict[int, Report]:
    """Return the reports by rank, of the ranks that have written one."""
    reports = (
        msgspec.json.decode(path.read_bytes(), type=Report)
        for path in sorted(folder.glob("rank-*.json"))
    )
    return {report.rank: report for report in reports}


def store_traceback(report: Report) -> Path | None:
    """Write a traceback into the run's folder; return its path, or None without a folder.

    The owner alone may read it if it holds secrets.
    """
    if not report.traceback or report.run_folder is None:
        return None
    path = Path(report.run_folder, f"error-rank-{report.rank}.txt")
    try:
        path.unlink(missing_ok=True)
        path.touch(0o600 if holds_secret(report.traceback) else 0o666)
        path.write_text(report.traceback, encoding="utf-8")
    except OSError:
        return None
    return path
