"""Checkpoint files that are complete or absent.

Lightning writes through fsspec, whose local transaction moves a file from the system's temporary
directory: across file systems that is a copy, and a kill in its middle leaves half a checkpoint
under the final name. Here a local file is written beside its final name, flushed to the disk and
renamed. Remote file systems keep Lightning's way.
"""

import contextlib
import os
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.folders.addresses import (
    as_os_errors,
    is_local,
    local_path,
    open_address,
)
from boltmesh.strategies.checkpoint.folders.opening import folder_at
from boltmesh.strategies.checkpoint.replacing import partial_path, remove, replace
from boltmesh.strategies.checkpoint.saving import save_into


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes one file per checkpoint; a kill at any moment leaves the old one or the new one."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        write_file(local_path(path), partial(save_into, checkpoint))

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Delete a checkpoint, be it a file, a directory or a link to one."""
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
        CheckpointError: It could not be written; what was there is still there.
    """
    beside = partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(beside)  # left behind by a run that was killed
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
    """Write a file to a remote file system in one request, which object stores do whole or not.

    Raises:
        CheckpointError: It could not be written.
    """
    system, path = open_address(address)
    try:
        with as_os_errors():
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
            system.pipe_file(path, data)
    except OSError as error:
        raise CheckpointError(cannot_write(address, error)) from error


def load_mapped(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Read a local file whose tensors stay on the disk until somebody looks at them."""
    checkpoint: dict[str, Any] = torch.load(
        path,
        map_location="cpu",
        # As Lightning decides for a local file.
        weights_only=weights_only,
        # The format of old torch versions cannot be mapped.
        mmap=zipfile.is_zipfile(path),
    )
    return checkpoint


def load_file(place: str | Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Read a file, mapped where it is local; from a remote file system all of it into memory."""
    if isinstance(place, Path):
        return load_mapped(place, weights_only=weights_only)
    return TorchCheckpointIO().load_checkpoint(place, weights_only=weights_only)


def cannot_write(target: str | Path, cause: BaseException | str) -> str:
    """Say that a checkpoint could not be written, and what that means."""
    reason = getattr(cause, "strerror", None) or cause
    return (
        f"{target} could not be written: {reason}. The checkpoints written before it are intact; "
        f"free some space or choose another folder."
    )
