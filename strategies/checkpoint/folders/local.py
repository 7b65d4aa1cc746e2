"""A folder of the operating system's: written beside its name, flushed to the disk, renamed."""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

from typing_extensions import override

from boltmesh.strategies.checkpoint.folders.folder import LAST, Start
from boltmesh.strategies.checkpoint.replacing import (
    flush_folder,
    partial_path,
    remove,
    replace,
    restore_aside,
)


class LocalFolder:
    """A ``Folder`` on a local or mounted disk.

    Args:
        path: Its path.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def __str__(self) -> str:
        return str(self._path)

    def is_there(self) -> bool:
        """One that a kill had set aside is put back."""
        restore_aside(self._path)
        return self._path.is_dir()

    def size(self, name: str) -> int:
        """Of a file."""
        return (self._path / name).stat().st_size

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file."""
        with (self._path / name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)

    def inside(self, within: str) -> "LocalFolder":
        """Where the files lie, in a copy of what was replaced on a remote file system."""
        return LocalFolder(self._path / within) if within else self

    def draft(self) -> "LocalDraft":
        """What takes this name."""
        return LocalDraft(self._path)

    def remove(self) -> None:
        """Delete it."""
        remove(self._path)


class LocalDraft:
    """A ``Draft`` that is renamed when it is finished.

    Args:
        target: The name that it takes then.
    """

    within = ""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._partial = partial_path(target)
        self._mark = f"begun-{uuid4().hex}"

    def begin(self) -> Start:
        """Make the folder beside the name."""
        remove(self._partial)  # left behind by a run that was killed
        self._partial.mkdir(parents=True)
        (self._partial / self._mark).touch()
        return Start(self._mark, self.within)

    def joins(self, start: Start) -> bool:
        """Look for the folder."""
        self._mark = start.mark
        return (self._partial / start.mark).exists()

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file that is flushed when it is left."""
        with (self._partial / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def size(self, name: str) -> int:
        """Of a file."""
        return (self._partial / name).stat().st_size

    def finish(self, last: bytes, names: Collection[str]) -> None:
        """Give it its name."""
        with self.create(LAST) as file:
            file.write(last)
        (self._partial / self._mark).unlink()
        flush_folder(self._partial)
        replace(self._partial, self._target)

    def abandon(self) -> None:
        """Delete it."""
        shutil.rmtree(self._partial, ignore_errors=True)
