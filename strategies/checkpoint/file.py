"""Checkpoint files that are complete or absent.

Lightning writes through fsspec, whose local transaction moves a file from the system's temporary
directory. Across file systems that is a copy, and a kill during it leaves an incomplete
checkpoint under the final name. Here a local file is written under a temporary name in the same
folder, flushed to the disk and renamed. Remote file systems use Lightning's implementation.

``save_into`` is ``torch.save`` to an open file, and raises the file's own errors.
"""

import contextlib
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.archive_check import check_values
from boltmesh.strategies.checkpoint.atomic_replace import (
    partial_path,
    remove,
    remove_killed_saves,
    replace,
)
from boltmesh.strategies.checkpoint.manifest import Written
from boltmesh.strategies.checkpoint.safe_load import check_weights_only, safe_load
from boltmesh.strategies.checkpoint.storage.addresses import (
    as_os_errors,
    is_local,
    local_path,
    naming,
    open_address,
    path_or_address,
)
from boltmesh.strategies.checkpoint.storage.folder import folder_at


def save_into(value: Any, file: IO[bytes]) -> None:
    """Write ``value``; errors of the file, such as a full disk, are raised unchanged.

    After a failed write torch still tries to complete its archive, and reports only that failure.

    Raises:
        OSError: If the file cannot be written.
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
    """A file that counts the bytes written to it and computes their checksum.

    Args:
        file: An open file, at its beginning.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.num_bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        """Write ``data``."""
        self.crc32 = zlib.crc32(data, self.crc32)
        written = self._file.write(data)
        self.num_bytes += memoryview(data).nbytes
        return written

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def written(self) -> Written:
        """Return the size and checksum of the file; no checksum if it was written out of order."""
        return Written(self.num_bytes, self.crc32)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes one file per checkpoint; a kill at any moment leaves the old or the new one."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        write_file(local_path(path), partial(save_into, checkpoint))

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file from a path or an address; no code that it names is executed.

        Raises:
            ConfigError: If ``weights_only`` is False.
            CheckpointError: If it is damaged, unsafe, or not a file of ``torch.save``.
        """
        check_weights_only(weights_only, path)
        return load_file(path_or_address(path), map_location=map_location)

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete a checkpoint: a file, a directory or a link to one."""
        if is_local(path):
            remove(local_path(path))
        elif (folder := folder_at(path)).is_there():
            folder.remove()
        else:
            super().remove_checkpoint(path)


def write_file(target: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file that is complete or absent.

    Args:
        target: Its path.
        fill: Writes the content.

    Raises:
        CheckpointError: If it cannot be written; a previous file is kept.
    """
    beside = partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_killed_saves(target)
        with beside.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        replace(beside, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove(beside)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(cannot_write(target, error)) from error


def put_file(address: str, data: bytes) -> None:
    """Write a file to a remote file system in one request, which object stores do atomically.

    Raises:
        CheckpointError: If it cannot be written.
    """
    system, path = open_address(address)
    try:
        with as_os_errors():
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
            system.pipe_file(path, data)
    except OSError as error:
        raise CheckpointError(cannot_write(address, error)) from error


def load_file(
    place: str | Path,
    *,
    is_mapped: bool = False,
    checks_values: bool = True,
    map_location: Any = "cpu",
) -> dict[str, Any]:
    """Read a file; no code that it names is executed.

    Args:
        place: Path or address; files at addresses are read into memory.
        is_mapped: Leave the tensors of a local file on the disk until they are read.
        checks_values: Compare its checksums first; it is enough if one rank does.
        map_location: As for ``torch.load``.

    Raises:
        CheckpointError: If it is damaged, unsafe, or not a file of ``torch.save``.
        OSError: If it is missing or cannot be read.
    """
    has_checksums = True
    if isinstance(place, Path):
        if place.exists() and not place.is_file():  # a pipe would wait, a device never end
            raise CheckpointError(f"{place} is no checkpoint: it is not a plain file.")
        if checks_values:
            with naming(place), place.open("rb") as file:
                has_checksums = check_values(file, place)
        # The format of old torch versions cannot be mapped.
        is_mapped = is_mapped and zipfile.is_zipfile(place)
        with naming(place):
            content = safe_load(place, place, is_mapped=is_mapped, map_location=map_location)
    else:
        system, path = open_address(place)
        with as_os_errors():
            data = BytesIO(system.cat_file(path))
        if checks_values:
            has_checksums = check_values(data, place)
            data.seek(0)
        content = safe_load(data, place, map_location=map_location)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{place} has no 'state_dict', as every checkpoint of Lightning has: it holds a "
            f"{type(content).__name__}. Give another checkpoint."
        )
    if not has_checksums:
        warnings.warn(
            f"{place} has no checksums, so that damaged values in it cannot be found: it was "
            f"written by torch before 1.6, or with torch.serialization.set_crc32_options(False).",
            stacklevel=2,
        )
    return content


def cannot_write(target: str | Path, cause: BaseException | str) -> str:
    """Return the message for a checkpoint that could not be written."""
    reason = getattr(cause, "strerror", None) or cause
    return (
        f"{target} could not be written: {reason}. The checkpoints written before it are intact; "
        f"free some space or choose another folder."
    )
