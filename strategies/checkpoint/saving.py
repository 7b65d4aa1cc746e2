"""``torch.save`` into an open file, with the error that the file gave, and with a checksum."""

import zlib
from typing import IO, Any

import torch

from boltmesh.strategies.checkpoint.manifest import Written


def save_into(value: Any, file: IO[bytes]) -> None:
    """Write ``value``; what the file raises, a full disk say, is raised as it is.

    torch ends its archive after a write has failed too, and says only that this failed.

    Raises:
        OSError: When the file could not be written.
    """
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if not isinstance(error.__context__, OSError):
            raise
        cause = error.__context__
    else:
        return
    raise cause


class SummedFile:
    """Passes on what is written, counts it and keeps its checksum.

    Args:
        file: Open, at its beginning.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.num_bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        """As a file's."""
        self.crc32 = zlib.crc32(data, self.crc32)
        written = self._file.write(data)
        self.num_bytes += memoryview(data).nbytes
        return written

    def flush(self) -> None:
        """As a file's."""
        self._file.flush()

    def written(self) -> Written:
        """Return what went into the file, where the checksum was not begun anew."""
        return Written(self.num_bytes, self.crc32)
