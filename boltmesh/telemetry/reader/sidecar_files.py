"""Reads the files beside a rank's telemetry file, each again only when it has changed.

``OutputTail`` has the newest lines that the rank has printed, ``ExpertLoads`` the rows that it has
sent to each expert.
"""

import os
from pathlib import Path
from typing import Final

import msgspec

from boltmesh.telemetry.job import UNREADABLE, Stamp, read_private, stamp_of
from boltmesh.telemetry.reader.file_records import MAX_NUMBER
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import ExpertLoad
from boltmesh.telemetry.writer.output import OLDER

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


MAX_MODULES: Final = 512
MAX_EXPERTS: Final = 4096


class ExpertLoads:
    """The counts of one rank.

    Args:
        path: Where the rank writes them; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: Stamp | None = None
        self._loads: tuple[ExpertLoad, ...] = ()

    def read(self) -> tuple[ExpertLoad, ...]:
        """Return the counts by module; the same object while they were not written again."""
        stamp = stamp_of(self._path)
        if stamp is None or stamp == self._stamp:
            return self._loads
        try:
            found = msgspec.json.decode(read_private(self._path), type=list[ExpertLoad])
        except (OSError, *UNREADABLE):
            return self._loads
        self._stamp = stamp
        self._loads = tuple(
            msgspec.structs.replace(each, module=clean(each.module, 200))
            for each in found[:MAX_MODULES]
            if _is_possible(each)
        )
        return self._loads


def _is_possible(load: ExpertLoad) -> bool:
    numbers = (*load.rows, *load.recent, load.dropped)
    return (
        0 < len(load.rows) == len(load.recent) <= MAX_EXPERTS
        and min(numbers) >= 0
        and max(numbers) <= MAX_NUMBER
    )
