"""How a strategy saves: one file of replicas, or a directory of the shards of all ranks.

A strategy whose ranks hold the whole model writes files as Lightning does, but atomically. One
whose ranks hold shards writes directories. Either may be written beside training.
"""

import warnings
from abc import abstractmethod
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from torch.distributed import ProcessGroup
from typing_extensions import override

from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.checkpoint.beside import SaveBeside, serialised
from boltmesh.strategies.checkpoint.directory import prepare_save, save_directory
from boltmesh.strategies.checkpoint.file import AtomicCheckpointIO, put_file, write_file
from boltmesh.strategies.checkpoint.folders.addresses import path_or_address
from boltmesh.strategies.checkpoint.together import together
from boltmesh.strategies.engine.resume import ResumeManager
from boltmesh.strategies.engine.stored_parts import StoredPartsStrategy
from boltmesh.telemetry.recording.recorder import NullRecorder, Recorder
from boltmesh.telemetry.traffic import CHECKPOINTS

AFTER_SAVING = "Trainer.save_checkpoint"
"""What the Trainer calls the barrier after a save."""


class SavingStrategy(StoredPartsStrategy):
    """Saves; what is saved is below, and loading above."""

    recorder: Recorder | NullRecorder
    _resume: ResumeManager | None
    _sigterm: compat.SigtermAgreement | None

    async_save = False
    """Whether checkpoints are written beside training."""
    _beside: SaveBeside | None = None
    _saving_group: ProcessGroup | None = None

    @property  # type: ignore[explicit-override]
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif compat.is_wrapping(self._checkpoint_io):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # type: ignore[attr-defined]
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if self.stores_shards:
            instead = " and give the strategy async_save=True" if compat.is_wrapping(io) else ""
            raise ConfigError(
                f"{self.public_name} writes its checkpoints by shards and would never call "
                f"{type(io).__name__}. Take the plugin out of Trainer(plugins=...){instead}."
            )
        self._checkpoint_io = io

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        with self.recorder.phase("checkpoint"):
            trainer = compat.trainer_of(self.lightning_module)
            if self.stores_shards and (obstacle := self._obstacle):
                warnings.warn(
                    f"{filepath} was not written: the run is ending by an error, and {obstacle}. "
                    f"The one before it is intact.",
                    stacklevel=2,
                )
                return
            if self._resume is not None and trainer is not None:
                checkpoint = self._resume.store(checkpoint, trainer)
            with nullcontext() if self._sigterm is None else self._sigterm.saving():
                self.finish_saving()
                if self._saves_beside and not compat.is_for_requeue(filepath):
                    self._save_beside(checkpoint, filepath, storage_options)
                    return
                if self.stores_shards:
                    self._save_shards(checkpoint, filepath, storage_options)
                else:
                    super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            self.recorder.event("checkpoint", str(filepath))

    def open_saving(self, timeout: timedelta) -> None:
        """Get ready to save beside a training that begins. Collective over all ranks.

        Args:
            timeout: How long a rank may wait for another one that writes.
        """
        if self._beside is None:
            self._beside = SaveBeside()
            self._saving_group = dist.new_group(
                backend="gloo", timeout=timeout, group_desc="checkpoints"
            )
            self.recorder.name_group(self._saving_group, CHECKPOINTS)

    @property
    def _saves_beside(self) -> bool:
        """Whether there is something beside which a checkpoint can be written."""
        trainer = compat.trainer_of(self.lightning_module)
        return self._beside is not None and trainer is not None and compat.is_in_fit(trainer)

    def _save_beside(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None
    ) -> None:
        """Copy what is to be written and begin to write it. Collective over all ranks."""
        assert self._beside is not None
        assert self._saving_group is not None
        place = self._place_of_all(filepath, storage_options)
        if self.stores_shards:
            prepare = partial(prepare_save, is_divided=self.divides_modules)
            write = prepare(checkpoint, place, self._saving_group)
        elif self.is_global_zero:
            write = partial(_write_file, place, serialised(checkpoint))
        else:
            return
        if not self.is_global_zero:
            self._beside.start(write)
            return
        self._beside.start(write, partial(self.recorder.event, "checkpoint", str(filepath)))

    def finish_saving(self) -> None:
        """Return when the checkpoint that is written beside training is complete.

        Collective over all ranks. Without one nothing happens.

        Raises:
            CheckpointError: On every rank, when it could not be written.
        """
        if self._beside is not None:
            together(self._beside.wait)

    def _close_saving(self) -> None:
        """Wait, on a rank whose run is over for whatever reason; others may be gone."""
        beside, self._beside, self._saving_group = self._beside, None, None
        if beside is not None:
            try:
                beside.wait()
            except Exception as error:  # noqa: BLE001 - the error that ends the run is to be seen
                warnings.warn(f"The last checkpoint is not there: {error}", stacklevel=2)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self._beside is None:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            # What takes its place may not be complete yet.
            self._beside.then(partial(self.checkpoint_io.remove_checkpoint, filepath))

    @override
    def barrier(self, name: str | None = None) -> None:
        # The Trainer meets after each save; a callback may save what a failing rank has.
        if not (name == AFTER_SAVING and self._is_alone):
            self._meet()

    @abstractmethod
    def _meet(self) -> None:
        """Return when all ranks have called this."""

    def _save_shards(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None
    ) -> None:
        place = self._place_of_all(filepath, storage_options)
        save_directory(checkpoint, place, is_divided=self.divides_modules)

    def _place_of_all(self, filepath: _PATH, storage_options: Any | None) -> str | Path:
        """Return where a checkpoint goes that ranks write to by themselves. Collective."""
        if storage_options is not None:
            what = "a checkpoint of shards" if self.stores_shards else "async_save=True"
            raise CheckpointError(
                f"{filepath} cannot be written with storage_options={storage_options!r}, which "
                f"are for a checkpoint plugin: {what} writes by itself. Leave them out, and give "
                f"fsspec what it needs by its own configuration."
            )
        return path_or_address(self.broadcast(filepath))


def _write_file(place: str | Path, data: bytes) -> None:
    if isinstance(place, Path):
        write_file(place, partial(_fill, data))
    else:
        put_file(place, data)


def _fill(data: bytes, file: IO[bytes]) -> None:
    file.write(data)
