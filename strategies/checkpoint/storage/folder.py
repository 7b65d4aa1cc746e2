"""A checkpoint's folder on any file system. Errors of any file system are OSErrors.

``LocalFolder`` is on a disk: written under a temporary name of each save, flushed, renamed.

``RemoteFolder`` is on a file system of fsspec, which may not be able to rename. Files are written
under their final names, and the last one completes the folder: a folder without it is not a
checkpoint. Object stores put files atomically. To replace a complete folder, the new files are
written to a subfolder, and the new last file, which names it, replaces the old one in a single put;
the files that the old one named are deleted afterwards.

``folder_at`` returns the folder at a path or an address; ``str`` gives that back. Several ranks
write a draft: the first one calls ``begin``, the others ``joins``, all create files, and the first
calls ``finish``. Then the folder is complete, and replaces a previous one.
"""

import errno
import os
import shutil
import stat
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from uuid import uuid4

from typing_extensions import override

from boltmesh.strategies.checkpoint.atomic_replace import (
    flush_folder,
    partial_path,
    remove,
    remove_killed_saves,
    replace,
    restore_aside,
)
from boltmesh.strategies.checkpoint.storage.addresses import (
    as_os_errors,
    is_local,
    kind_at,
    local_path,
    naming,
    open_address,
)

LAST = "manifest.json"
"""The file that is written last. Without it a folder is no checkpoint."""

_MARK = "begun-"
"""Begins the name of a file that every rank has to see in a folder; the id of the save follows."""


class DraftStart(NamedTuple):
    """Sent by the rank that starts a folder to the others."""

    save: str
    """Random id of this save."""
    name: str
    """Name under which the folder is written."""
    within: str
    """Prefix of the files within the folder: ``""``, or the name of a subfolder and ``/``."""


class LocalFolder:
    """A folder on a local or mounted disk.

    Args:
        path: Its path.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def __str__(self) -> str:
        return str(self._path)

    def is_there(self) -> bool:
        """Whether the folder exists; restores one whose replacement was killed."""
        restore_aside(self._path)
        return self._path.is_dir()

    def size(self, name: str) -> int:
        """Return the bytes of a file; a missing one is a FileNotFoundError."""
        with self._open(name) as file:
            return os.fstat(file.fileno()).st_size

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file, fewer at its end; a missing one is a FileNotFoundError."""
        with naming(self._path / name), self._open(name) as file:
            file.seek(start)
            if length is not None:  # a forged one would reserve memory
                length = max(0, min(length, os.fstat(file.fileno()).st_size - start))
            return file.read(-1 if length is None else length)

    def _open(self, name: str) -> IO[bytes]:
        """Open a plain file of this folder: not a pipe, which would wait, nor a link out of it."""
        path = self._path / name
        if path.is_symlink() and not path.resolve().is_relative_to(self._path.resolve()):
            raise OSError(errno.ELOOP, "it is a link out of the folder", str(path))
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        return file

    def inside(self, within: str) -> "LocalFolder":
        """Return the folder of the files, a subfolder in copies of some remote checkpoints.

        Args:
            within: See ``DraftStart``.
        """
        return LocalFolder(self._path / within) if within else self

    def draft(self) -> "LocalDraft":
        """Return the draft of a new folder with this name."""
        return LocalDraft(self._path)

    def remove(self) -> None:
        """Delete the folder."""
        remove(self._path)


class LocalDraft:
    """A folder that is renamed when it is finished.

    Args:
        target: Its final name.
    """

    within = ""
    """See ``DraftStart``, like ``save``; both are known once it has begun."""
    save = ""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._partial = partial_path(target)

    def begin(self) -> DraftStart:
        """Create the folder under its temporary name, and delete the remains of killed saves."""
        self.save = uuid4().hex
        self._target.parent.mkdir(parents=True, exist_ok=True)
        remove_killed_saves(self._target)
        self._partial.mkdir()
        self._mark.touch()
        return DraftStart(self.save, self._partial.name, self.within)

    def joins(self, start: DraftStart) -> bool:
        """Join the folder that the first rank has begun; False if this rank does not see it."""
        self.save = start.save
        self._partial = self._target.with_name(start.name)
        return self._mark.exists()

    @property
    def _mark(self) -> Path:
        return self._partial / f"{_MARK}{self.save}"

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file, which is flushed to its medium when the context ends."""
        with (self._partial / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def size(self, name: str) -> int:
        """Return the size of a file that any rank has created."""
        return (self._partial / name).stat().st_size

    def finish(self, last: bytes, names: Collection[str]) -> None:
        """Write the last file and rename the folder.

        Args:
            last: Content of ``LAST``.
            names: All other files of the folder.
        """
        with self.create(LAST) as file:
            file.write(last)
        self._mark.unlink()
        flush_folder(self._partial)
        replace(self._partial, self._target)

    def abandon(self) -> None:
        """Delete the folder; a previous one is kept."""
        shutil.rmtree(self._partial, ignore_errors=True)


class RemoteFolder:
    """A folder at an address.

    Args:
        address: With its protocol, for example ``s3://bucket/name.ckpt``.
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
        """Whether anything exists below the address."""
        return kind_at(self._system, self._path) == "directory"

    def size(self, name: str) -> int:
        """Return the size of a file."""
        with as_os_errors():
            return int(self._system.info(f"{self._path}/{name}")["size"])

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file, reading no others."""
        end = None if length is None else start + length
        with as_os_errors():
            data: bytes = self._system.cat_file(f"{self._path}/{name}", start=start, end=end)
        return data

    def inside(self, within: str) -> "RemoteFolder":
        """Return the folder of the files."""
        return RemoteFolder(f"{self._address}/{within}") if within else self

    def draft(self) -> "RemoteDraft":
        """Return the draft of a new folder with this name."""
        return RemoteDraft(self._address, self._system, self._path)

    def remove(self) -> None:
        """Delete the last file first, so that the remains after a kill are no checkpoint."""
        last = f"{self._path}/{LAST}"
        with as_os_errors():
            if kind_at(self._system, last):
                self._system.rm_file(last)
            if kind_at(self._system, self._path):
                self._system.rm(self._path, recursive=True)


class RemoteDraft:
    """A folder that its last file completes.

    Args:
        address: For messages.
        system: The file system of fsspec.
        path: The folder's path in it.
    """

    within = ""
    save = ""

    def __init__(self, address: str, system: Any, path: str) -> None:
        self._address = address
        self._system = system
        self._path = path

    def begin(self) -> DraftStart:
        """Choose the folder for files.

        Raises:
            OSError: Also if a file has the name: nothing could replace it in one step.
        """
        save = uuid4().hex
        with as_os_errors():
            kind = kind_at(self._system, self._path)
            if kind == "file":
                raise FileExistsError(
                    f"a file has this name, and a folder is to be written; delete {self._address} "
                    f"or choose another name"
                )
            if kind_at(self._system, f"{self._path}/{LAST}"):
                self.within = f"{save[:12]}/"
            elif kind is not None:
                # Left behind by a run that was killed.
                self._system.rm(self._path, recursive=True)
            self.save = save
            self._system.makedirs(f"{self._path}/{self.within}".rstrip("/"), exist_ok=True)
            self._system.pipe_file(self._mark, save.encode())
        return DraftStart(self.save, self._path, self.within)

    def joins(self, start: DraftStart) -> bool:
        """Join the folder that the first rank has begun; False if this rank does not see it."""
        self.save, _, self.within = start
        return kind_at(self._system, self._mark) is not None

    @property
    def _mark(self) -> str:
        return f"{self._path}/{self.within}{_MARK}{self.save}"

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file; only as much as its library sends at once is kept in memory."""
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
        """Return the size of a file that another rank may just have written."""
        with as_os_errors():
            self._system.invalidate_cache()
            return int(self._system.info(f"{self._path}/{self.within}{name}")["size"])

    def finish(self, last: bytes, names: Collection[str]) -> None:
        """Put the last file, then delete files that it does not name; see ``LocalDraft.finish``."""
        with as_os_errors():
            self._system.pipe_file(f"{self._path}/{LAST}", last)
        kept = {f"{self._path}/{LAST}", *(f"{self._path}/{self.within}{name}" for name in names)}
        try:
            with as_os_errors():
                self._system.invalidate_cache()
                listed = set(self._system.find(self._path))
                # A file system may list files under other names than it was given.
                for path in listed - kept if kept <= listed else ():
                    self._system.rm_file(path)
        except OSError as error:
            warnings.warn(
                f"{self._address} is complete, and files of the checkpoint that it replaces could "
                f"not be deleted ({error}). The next save under this name deletes them.",
                stacklevel=2,
            )

    def abandon(self) -> None:
        """Delete the files, if the file system allows; the next save deletes the rest."""
        if not self.save:
            return
        with suppress(OSError), as_os_errors():
            self._system.invalidate_cache()
            self._system.rm(f"{self._path}/{self.within}".rstrip("/"), recursive=True)


def _drop(file: Any) -> None:
    """Discard a failed upload: closing it, explicitly or by the collector, would put it."""
    with suppress(Exception):  # the first error is the one to raise
        file.discard()
    with suppress(Exception):
        file.closed = True


class _RemoteFile:
    """A file whose errors are OSErrors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """Write ``data``."""
        with as_os_errors():
            written: int = self._file.write(data)
        return written

    def flush(self) -> None:
        """No effect: it would send a small part, which object stores allow only as the last."""


Folder = LocalFolder | RemoteFolder
"""A folder to read. A missing file is a FileNotFoundError for ``size`` and ``read``."""
Draft = LocalDraft | RemoteDraft
"""A folder that several ranks write.

``within`` and ``save``, see ``DraftStart``, are known once it has begun. A file that ``create``
opens is flushed to its medium when the context ends, and ``size`` is that of a file of any rank.
"""


def folder_at(place: str | Path) -> Folder:
    """Return the folder at a path or an address, which need not exist.

    Raises:
        ConfigError: If fsspec cannot open the address.
    """
    return LocalFolder(local_path(place)) if is_local(place) else RemoteFolder(str(place))
