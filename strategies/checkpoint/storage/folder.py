"""What a checkpoint's folder can do, wherever it lies. Errors of any file system are OSErrors.

A folder of the operating system's: written beside its name, flushed to the disk, renamed.

A folder of any file system of fsspec's, which need not know how to rename.

Files go under their final names, and the last one says that all are there: a folder without it is
no checkpoint. Object stores put a file whole or not at all, so that there is no moment between.
Where a complete folder is to be replaced, the new files go into a folder inside of it, and the new
last file says so: it takes the place of the old one in a single write, and what that had named is
deleted afterwards.

From a path or an address to the folder there.
"""

import os
import shutil
import warnings
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast
from uuid import uuid4

from typing_extensions import override

from boltmesh.strategies.checkpoint.atomic_replace import (
    flush_folder,
    partial_path,
    remove,
    replace,
    restore_aside,
)
from boltmesh.strategies.checkpoint.storage.addresses import (
    as_os_errors,
    is_local,
    kind_at,
    local_path,
    open_address,
)

LAST = "manifest.json"
"""The file that is written last. Without it a folder is no checkpoint."""


class DraftStart(NamedTuple):
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

    def begin(self) -> DraftStart:
        """Make room for it, and take away what a killed save has left there."""

    def joins(self, start: DraftStart) -> bool:
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

    def begin(self) -> DraftStart:
        """Make the folder beside the name."""
        remove(self._partial)  # left behind by a run that was killed
        self._partial.mkdir(parents=True)
        (self._partial / self._mark).touch()
        return DraftStart(self._mark, self.within)

    def joins(self, start: DraftStart) -> bool:
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


class RemoteFolder:
    """A ``Folder`` at an address.

    Args:
        address: With its protocol, ``s3://bucket/name.ckpt`` say.
    """

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._system, path = open_address(self._address)
        self._path = path.rstrip("/")
        self._system.invalidate_cache()  # others write here too

    @override
    def __str__(self) -> str:
        return self._address

    def is_there(self) -> bool:
        """Whether anything lies below the address."""
        return kind_at(self._system, self._path) == "directory"

    def size(self, name: str) -> int:
        """Of a file."""
        with as_os_errors():
            return int(self._system.info(f"{self._path}/{name}")["size"])

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, and of no more than those."""
        end = None if length is None else start + length
        with as_os_errors():
            data: bytes = self._system.cat_file(f"{self._path}/{name}", start=start, end=end)
        return data

    def inside(self, within: str) -> "RemoteFolder":
        """Where the files lie."""
        return RemoteFolder(f"{self._address}/{within}") if within else self

    def draft(self) -> "RemoteDraft":
        """What takes this name."""
        return RemoteDraft(self._address, self._system, self._path)

    def remove(self) -> None:
        """Delete the last file first: what is left by a kill is no checkpoint any more."""
        last = f"{self._path}/{LAST}"
        with as_os_errors():
            if kind_at(self._system, last):
                self._system.rm_file(last)
            if kind_at(self._system, self._path):
                self._system.rm(self._path, recursive=True)


class RemoteDraft:
    """A ``Draft`` whose last file makes it complete.

    Args:
        address: For messages.
        system: The file system of fsspec.
        path: The folder's path in it.
    """

    within = ""

    def __init__(self, address: str, system: Any, path: str) -> None:
        self._address = address
        self._system = system
        self._path = path
        self._mark = ""

    def begin(self) -> DraftStart:
        """Choose where files go.

        Raises:
            OSError: Also when a file has the name: nothing could take its place in one step.
        """
        token = uuid4().hex
        with as_os_errors():
            kind = kind_at(self._system, self._path)
            if kind == "file":
                raise FileExistsError(
                    f"a file has this name, and a folder is to be written; delete {self._address} "
                    f"or choose another name"
                )
            if kind_at(self._system, f"{self._path}/{LAST}"):
                self.within = f"{token[:12]}/"
            elif kind is not None:
                # Left behind by a run that was killed.
                self._system.rm(self._path, recursive=True)
            self._mark = f"{self.within}begun-{token}"
            self._system.makedirs(f"{self._path}/{self.within}".rstrip("/"), exist_ok=True)
            self._system.pipe_file(f"{self._path}/{self._mark}", token.encode())
        return DraftStart(self._mark, self.within)

    def joins(self, start: DraftStart) -> bool:
        """Look for the mark."""
        self._mark, self.within = start
        return kind_at(self._system, f"{self._path}/{start.mark}") is not None

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file; nothing is kept of it here but what its library sends at once."""
        with as_os_errors():
            file = self._system.open(f"{self._path}/{self.within}{name}", "wb")
        try:
            yield cast("IO[bytes]", _RemoteFile(file))
            with as_os_errors():
                file.close()
        except BaseException:
            _drop(file)
            raise

    def size(self, name: str) -> int:
        """Of a file, as another rank may have written it just now."""
        with as_os_errors():
            self._system.invalidate_cache()
            return int(self._system.info(f"{self._path}/{self.within}{name}")["size"])

    def finish(self, last: bytes, names: Collection[str]) -> None:
        """Put the last file, then delete what it does not name."""
        with as_os_errors():
            self._system.pipe_file(f"{self._path}/{LAST}", last)
        kept = {f"{self._path}/{LAST}", *(f"{self._path}/{self.within}{name}" for name in names)}
        try:
            with as_os_errors():
                self._system.invalidate_cache()
                found = set(self._system.find(self._path))
                # A file system that names files otherwise than it is asked for them keeps them.
                for path in found - kept if kept <= found else ():
                    self._system.rm_file(path)
        except OSError as error:
            warnings.warn(
                f"{self._address} is complete, and files of the checkpoint that it replaces could "
                f"not be deleted ({error}). The next save under this name deletes them.",
                stacklevel=2,
            )

    def abandon(self) -> None:
        """Delete what was written, as far as the file system lets; the next save does the rest."""
        if not self._mark:
            return
        with suppress(OSError), as_os_errors():
            self._system.invalidate_cache()
            self._system.rm(f"{self._path}/{self.within}".rstrip("/"), recursive=True)


def _drop(file: Any) -> None:
    """Let go of an upload that failed: closed as usual, or by the collector, it would be put."""
    with suppress(Exception):  # the first error is the one to see
        file.discard()
    with suppress(Exception):
        file.closed = True


class _RemoteFile:
    """A file whose errors are OSErrors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """As a file's."""
        with as_os_errors():
            written: int = self._file.write(data)
        return written

    def flush(self) -> None:
        """Nothing: it would send a small part, which object stores refuse but for the last."""


def folder_at(place: str | Path) -> Folder:
    """Return the folder at a path or an address, which need not exist.

    Raises:
        ConfigError: When fsspec cannot open the address.
    """
    return LocalFolder(local_path(place)) if is_local(place) else RemoteFolder(str(place))
