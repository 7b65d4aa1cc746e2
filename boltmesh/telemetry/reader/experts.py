"""Reads the rows that a rank has sent to each expert, again only when they were written again."""

from pathlib import Path
from typing import Final

import msgspec

from boltmesh.telemetry.job import UNREADABLE, Stamp, read_private, stamp_of
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import ExpertLoad
from boltmesh.telemetry.writer.file_records import MAX_NUMBER

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
