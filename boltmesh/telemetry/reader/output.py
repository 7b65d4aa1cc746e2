"""Reads the newest lines that a rank has printed, again only when there are new ones."""

import os
from pathlib import Path
from typing import Final

from boltmesh.telemetry.sanitize import clean

OLDER: Final = ".old"
"""Ending of the older half, as ``writer.output`` names it."""
_LINE_BYTES: Final = 200
"""Bytes that are read for each line that is asked for."""


class OutputTail:
    """The end of one rank's output.

    Args:
        path: The newer half; neither file need exist.
        most_lines: Lines that are kept.
    """

    def __init__(self, path: Path, most_lines: int) -> None:
        self._path = path
        self._most = most_lines
        self._stamp: tuple[int, int] | None = None
        self._lines: tuple[str, ...] = ()

    def read(self) -> tuple[str, ...]:
        """Return the newest lines, oldest first; the same object while there are no new ones."""
        try:
            found = os.lstat(self._path)
        except OSError:
            return self._lines
        stamp = (found.st_ino, found.st_size)
        if stamp == self._stamp:
            return self._lines
        self._stamp = stamp
        text = self._end_of(self._path)
        lines = text.splitlines()
        if len(lines) < self._most:
            older = self._path.with_name(self._path.name + OLDER)
            lines = [*self._end_of(older).splitlines(), *lines]
        self._lines = tuple(clean(line) for line in lines[-self._most :])
        return self._lines

    def _end_of(self, path: Path) -> str:
        size = self._most * _LINE_BYTES
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        with open(handle, "rb") as file:
            begin = max(0, os.fstat(file.fileno()).st_size - size)
            file.seek(begin)
            text = file.read(size).decode("utf-8", "replace")
        # The first line may have lost its begin.
        return text.partition("\n")[2] if begin else text
