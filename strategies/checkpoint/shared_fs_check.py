"""Checks before the first step that all ranks see the folders to which they write together.

A checkpoint of shards is a folder into which every rank writes its own. The disk of one host, or
the memory of one process, would hold a part of it, which would be noticed only at the first save.
``FolderProbe`` is a file by which ranks find out whether they see the same folder.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.strategies.checkpoint.collective_errors import run_on_rank0_and_broadcast
from boltmesh.strategies.checkpoint.storage.addresses import (
    as_os_errors,
    kind_at,
    mended,
    open_address,
    path_or_address,
)


class FolderProbe:
    """A file that one rank writes and the others look for; failures are OSErrors.

    Args:
        place: Path or address of the folder, which the first rank creates.
    """

    def __init__(self, place: str | Path) -> None:
        self._place = place

    def write(self) -> str:
        """Create the file and return its name."""
        name = f".boltmesh-{uuid4().hex}"
        if isinstance(self._place, Path):
            self._place.mkdir(parents=True, exist_ok=True)
            (self._place / name).touch()
            return name
        system, path = open_address(self._place)
        with as_os_errors():
            system.makedirs(path, exist_ok=True)
            system.pipe_file(f"{path}/{name}", b"boltmesh")
        return name

    def is_seen(self, name: str) -> bool:
        """Whether the file is in this rank's folder."""
        if isinstance(self._place, Path):
            return (self._place / name).exists()
        system, path = open_address(self._place)
        return kind_at(system, f"{path}/{name}") is not None

    def remove(self, name: str) -> None:
        """Delete the file."""
        if isinstance(self._place, Path):
            (self._place / name).unlink(missing_ok=True)
            return
        system, path = open_address(self._place)
        with as_os_errors():
            system.rm_file(f"{path}/{name}")


def mend_folders(trainer: Trainer) -> None:
    """Restore the ``file://`` folder that callbacks were given, see ``mended``."""
    for callback in _savers(trainer):
        callback.dirpath = mended(str(callback.dirpath))


def refuse_unshared_folders(trainer: Trainer) -> None:
    """Refuse folders of callbacks that not all ranks see. Collective over all ranks.

    Raises:
        ConfigError: On every rank, naming the folder and a rank that does not see it.
    """
    if trainer.world_size == 1 or getattr(trainer, "fast_dev_run", False):
        return
    saving = (each for each in _savers(trainer) if each.save_top_k != 0 or each.save_last)
    for folder in dict.fromkeys(str(each.dirpath) for each in saving):
        _refuse_unshared(folder)


def _savers(trainer: Trainer) -> Iterator[ModelCheckpoint]:
    for each in trainer.checkpoint_callbacks:
        if isinstance(each, ModelCheckpoint) and each.dirpath is not None:
            yield each


def _refuse_unshared(folder: str) -> None:
    probe = FolderProbe(path_or_address(folder))
    try:
        name = run_on_rank0_and_broadcast(probe.write)
    except CheckpointError as error:
        raise ConfigError(
            f"ModelCheckpoint saves to {folder}, and nothing can be written there: {error}. "
            f"Give it another dirpath."
        ) from error
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, _look(probe, name))
    if dist.get_rank() == 0:
        with suppress(OSError):  # a rank that may write but not delete leaves an empty file
            probe.remove(name)
    for rank, report in enumerate(reports):
        if report is not None:
            raise ConfigError(
                f"ModelCheckpoint saves to {folder}, where all ranks write their shards together, "
                f"and rank {rank} does not see what rank 0 writes there{report}. Give it a dirpath "
                f"that all ranks share: a mounted folder, or an address like s3://bucket/folder."
            )


def _look(probe: FolderProbe, name: str) -> str | None:
    """Return why this rank does not see the file; None if it does."""
    try:
        return None if probe.is_seen(name) else ""
    except OSError as error:
        return f" ({error})"
