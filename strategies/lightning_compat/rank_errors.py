"""Errors of the ranks that a script has started: the first cause is the last on the screen.

Each failing rank leaves a report for the process that started it, and its traceback in a file. That
process shows the traceback of the rank that failed first, and below it one line that says what
failed and where the tracebacks of the other ranks are.
"""

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from boltmesh.rank_reports import (
    Report,
    make_report_folder,
    read_reports,
    report_of_error,
    store_traceback,
    write_report,
)

_FOLDER = "BOLTMESH_RANK_REPORTS"
_POLL_S = 0.03


class RankErrors:
    """Reports between a script's process and the ranks that it starts.

    Args:
        rank: Global rank of this process.
        log_folder: Where tracebacks are written; the temporary folder where that is no directory.
    """

    def __init__(self, rank: int, log_folder: str | os.PathLike[str]) -> None:
        is_local = os.path.isdir(log_folder)
        self.rank = rank
        self.log_folder = Path(log_folder if is_local else tempfile.gettempdir()).absolute()

    @staticmethod
    def open_folder() -> None:
        """Make a folder for reports, which processes that are started later inherit."""
        os.environ[_FOLDER] = str(make_report_folder())
        atexit.register(RankErrors.remove_folder, of=os.getpid())

    @staticmethod
    def remove_folder(of: int | None = None) -> None:
        """Remove the folder of reports, at the end of the process that made it.

        Args:
            of: That process; a fork of it runs its exit functions too, and removes nothing.
        """
        folder = os.environ.get(_FOLDER)
        if folder is not None and of in (None, os.getpid()):
            shutil.rmtree(folder, ignore_errors=True)

    def report(self, error: Exception) -> None:
        """Leave a report for the process that started this one, which shows it."""
        report = report_of_error(error, rank=self.rank, run_folder=self.log_folder)
        store_traceback(report)
        with contextlib.suppress(FileNotFoundError):  # that process showed its own error and ended
            write_report(Path(os.environ[_FOLDER]), report)
        _hide(error)

    def show(self, error: Exception, find_death: Callable[[], str | None], within_s: float) -> None:
        """Show which rank failed first; hide an error of this process that follows from it.

        Args:
            error: The one that this process ends with.
            find_death: Returns in words which rank has died without a report, None if none has.
            within_s: How long to wait for the cause of an error that names a lost peer.
        """
        own = report_of_error(error, rank=self.rank, run_folder=self.log_folder)
        deadline = time.monotonic() + within_s
        while True:
            first, death = self._first_cause(), find_death()
            is_known = first is not None or death is not None
            if own.kind != "consequence" or is_known or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        if own.kind != "consequence" and (
            first is None or own.time_ns < first.time_ns or own.message == first.message
        ):
            if first is not None:
                _print(f"boltmesh: tracebacks of other ranks: {self.logs}")
            return
        if first is None and death is None:
            return
        store_traceback(own)
        self.show_first(death or "")
        _hide(error)

    def show_first(self, death: str) -> None:
        """Show the report of the rank that failed first, or how one died.

        Args:
            death: Which rank has died without a report, in words.
        """
        first = self._first_cause()
        if first is None:
            line = death
        else:
            _print(first.traceback.rstrip())
            line = f"rank {first.rank} failed: {first.message}"
        _print(f"boltmesh: {line.rstrip('.')}. Tracebacks of other ranks: {self.logs}")

    @property
    def logs(self) -> Path:
        """Files of all tracebacks, as a pattern."""
        return self.log_folder / "error-rank-*.txt"

    @staticmethod
    def _first_cause() -> Report | None:
        """Return the first report of a rank that failed by itself."""
        reports = read_reports(Path(os.environ[_FOLDER])).values()
        causes = [each for each in reports if each.kind in {"user", "failure"}]
        return min(causes, key=lambda each: each.time_ns, default=None)


def _hide(error: Exception) -> None:
    """Do not print the traceback of an error that ends this process."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if value is not error:
            before(kind, value, traceback)

    sys.excepthook = hook


def _print(text: str) -> None:
    # The logging of a process about to end cannot be trusted to flush.
    print(text, file=sys.stderr, flush=True)  # noqa: T201
