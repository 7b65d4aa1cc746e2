"""Keeps the output of a rank beside its telemetry: the newest lines, without secrets.

The ``write`` of ``sys.stdout`` and ``sys.stderr`` is wrapped, so the streams stay what they are: a
terminal remains a terminal, and each line is on the disk before the next one is printed, whatever
kills the rank then. What native code writes to the descriptors itself is not kept. A line that a
progress bar writes over is kept once, as it was when the line ended; of a bar below another one,
which moves the cursor up again, the last state.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from boltmesh.telemetry.redaction import redact_text

MAX_BYTES: Final = 128 * 1024
"""Size of one file; a full one becomes the older half, and a new one begins."""
MAX_LINE: Final = 2000
OLDER: Final = ".old"
CURSOR_UP: Final = "\x1b[A"

_keepers: "list[OutputKeeper]" = []
"""One at most: a process has one stdout."""


def keep_output(path: Path) -> None:
    """Keep the output of this rank from now to the end of the process; one file at a time.

    A file of this process is continued, as by fit and then test under one job id.

    Raises:
        OSError: The file cannot be had.
    """
    if any(keeper.path == path for keeper in _keepers):
        return
    stop_keeping()
    keeper = OutputKeeper(path)
    _keepers.append(keeper)
    for stream in {sys.stdout, sys.stderr} - {None}:
        keeper.wrap(stream)


def stop_keeping() -> None:
    """Give the streams back."""
    while _keepers:
        _keepers.pop().close()


def keep_lines(text: str) -> None:
    """Keep lines that another process prints, such as a traceback that the launcher prints."""
    for keeper in _keepers:
        keeper.add(text if text.endswith("\n") else f"{text}\n")


class OutputKeeper:
    """Appends lines to a bounded file.

    Args:
        path: The file; the older half is beside it. Earlier output of a rank is replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._older = path.with_name(path.name + OLDER)
        self._older.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._flags = flags
        self._file = os.open(path, flags, 0o600)
        self._size = 0
        self._pid = os.getpid()
        self._unended = ""
        self._lower_bar = ""
        """The newest line that ended with the cursor moved up, to be written over."""
        self._lock = threading.RLock()
        self._wrapped = contextlib.ExitStack()
        self._is_open = True

    def wrap(self, stream: Any) -> None:
        """Copy writes to a stream; a stream that takes no attribute is left alone."""
        write = stream.write

        def write_and_keep(text: str) -> int:
            written: int = write(text)
            if self._is_open:
                with contextlib.suppress(Exception):  # the rank prints as it would without us
                    self.add(text)
            return written

        def unwrap() -> None:
            if stream.write is not write_and_keep:
                return  # another library has wrapped it since
            if own is None:
                del stream.write
            else:
                stream.write = own

        with contextlib.suppress(AttributeError, TypeError):
            own = vars(stream).get("write")
            stream.write = write_and_keep
            self._wrapped.callback(unwrap)

    def add(self, text: str) -> None:
        """Take a piece of output; lines are written as they end."""
        if os.getpid() != self._pid:
            return  # a worker of a loader shares the streams, not the file
        with self._lock:
            *ended, rest = (self._unended + text).split("\n")
            # A terminal writes over everything before a carriage return.
            self._unended = rest.rpartition("\r")[2][:MAX_LINE]
            for line in ended:
                self._end_line(line.rstrip("\r").rpartition("\r")[2])

    def _end_line(self, line: str) -> None:
        if line.endswith(CURSOR_UP):
            self._lower_bar = line.replace(CURSOR_UP, "")
            return
        if self._lower_bar:
            self._write(self._lower_bar)
            self._lower_bar = ""
        self._write(line)

    def _write(self, line: str) -> None:
        shown = redact_text(line[:MAX_LINE])
        stamp = time.strftime("%H:%M:%S")
        data = f"{stamp} {shown}\n".encode("utf-8", "replace")
        if self._size + len(data) > MAX_BYTES:
            with contextlib.suppress(FileNotFoundError):  # a cleaner removed it
                os.replace(self.path, self._older)
            # The old one stays open until there is a new one: its number would become that of
            # another file of the process, and be closed with the next line.
            old, self._file = self._file, os.open(self.path, self._flags, 0o600)
            os.close(old)
            self._size = 0
        os.write(self._file, data)
        self._size += len(data)

    def close(self) -> None:
        """Write the unfinished line, and restore the streams."""
        with self._lock:
            if os.getpid() == self._pid:
                with contextlib.suppress(OSError):
                    for line in filter(None, (self._lower_bar, self._unended)):
                        self._write(line.replace(CURSOR_UP, ""))
            self._is_open = False
            os.close(self._file)
        self._wrapped.close()
