"""Checkpoint files that are complete or absent.

Lightning writes through fsspec, whose local transaction moves a file from the system's temporary
directory: across file systems that is a copy, and a kill in its middle leaves half a checkpoint
under the final name. Here a local file is written beside its final name, flushed to the disk and
renamed. Remote file systems keep Lightning's way.
"""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from boltmesh.errors import CheckpointError

PARTIAL = ".partial"
"""Ends the name of a file that is being written; nobody resumes from one."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes one file per checkpoint; a kill at any moment leaves the old one or the new one."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        target = Path(str(path).removeprefix("file://"))
        partial = target.with_name(target.name + PARTIAL)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
            _flush_folder(target.parent)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise CheckpointError(
                f"{target} could not be written: {error.strerror or error}. The checkpoints "
                f"written before it are intact; free some space or choose another folder."
            ) from error


def _is_local(path: _PATH) -> bool:
    protocol = get_filesystem(path).protocol
    names = (protocol,) if isinstance(protocol, str) else protocol
    return "file" in names or "local" in names


def _flush_folder(folder: Path) -> None:
    """Make the rename itself survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
