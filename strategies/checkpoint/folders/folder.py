"""What a checkpoint's folder can do, wherever it lies. Errors of any file system are OSErrors."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import IO, NamedTuple, Protocol

LAST = "manifest.json"
"""The file that is written last. Without it a folder is no checkpoint."""


class Start(NamedTuple):
    """What the rank that begins a folder tells the others."""

    mark: str
    """A file in it that every rank has to see."""
    within: str
    """Where in the folder its files go: ``""``, or the name of a folder and ``/``."""


class Folder(Protocol):
    """A folder that is read; ``str`` gives its path or address."""

    def is_there(self) -> bool:
        """Whether there is a folder, complete or not."""

    def size(self, name: str) -> int:
        """Return the bytes of a file; a missing one is a FileNotFoundError."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file, fewer where it ends; a missing one is a FileNotFoundError."""

    def inside(self, within: str) -> "Folder":
        """Return the folder in which the files lie, see ``Start``."""

    def draft(self) -> "Draft":
        """Return what is to be written and takes this folder's name."""

    def remove(self) -> None:
        """Delete it, so that no half of it is ever taken for a checkpoint."""


class Draft(Protocol):
    """A folder that several ranks write.

    The first rank begins, the others join it, all create files, and the first finishes it.
    """

    @property
    def within(self) -> str:
        """See ``Start``; known once it has begun."""

    def begin(self) -> Start:
        """Make room for it, and take away what a killed save has left there."""

    def joins(self, start: Start) -> bool:
        """Go on with what the first rank has begun; False when this rank does not see it."""

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a new file for writing; its bytes are on their medium when it is left."""

    def size(self, name: str) -> int:
        """Return the bytes of a file that any rank has created."""

    def finish(self, last: bytes, names: Collection[str]) -> None:
        """Write ``LAST``; then this is complete, and in the place of what was there.

        Args:
            last: Its content.
            names: All other files that belong to the folder.
        """

    def abandon(self) -> None:
        """Take away what has been written; what was there before stays."""
