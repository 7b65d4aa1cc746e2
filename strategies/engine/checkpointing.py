"""How a strategy loads what it, or any other, has saved: a file or a directory of shards.

Each rank reads the part of the model that it holds, from either.

What a rank puts into a checkpoint: the whole model of a replica, or the parts that it holds.

The dictionaries that Lightning asks for. A part is a DTensor, or a plain tensor that is told to be
part of a larger one, so that a checkpoint holds everything where it lies in the whole.

How a strategy saves: one file of replicas, or a directory of the shards of all ranks.

A strategy whose ranks hold the whole model writes files as Lightning does, but atomically. One
whose ranks hold shards writes directories. Either may be written beside training.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerStatus
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.strategies.checkpoint.async_save import AsyncSave, serialised
from boltmesh.strategies.checkpoint.chunks import TensorPart
from boltmesh.strategies.checkpoint.collective_errors import all_or_none
from boltmesh.strategies.checkpoint.directory import (
    is_directory,
    load_directory,
    prepare_save,
    save_directory,
)
from boltmesh.strategies.checkpoint.file import AtomicCheckpointIO, load_file, put_file, write_file
from boltmesh.strategies.checkpoint.optimizer_state import is_named, load_states, named_state
from boltmesh.strategies.checkpoint.safe_load import check_weights_only
from boltmesh.strategies.checkpoint.shard_reader import Placeholder, divided, held, passed_over
from boltmesh.strategies.checkpoint.storage.addresses import path_or_address
from boltmesh.strategies.data_parallel.axis import DataAxis
from boltmesh.strategies.engine.axis import AxisHooks
from boltmesh.strategies.engine.resume import ResumeManager
from boltmesh.strategies.lightning_compat.launchers import SigtermAgreement
from boltmesh.strategies.lightning_compat.trainer import (
    is_for_requeue,
    is_in_fit,
    is_wrapping,
    trainer_of,
)
from boltmesh.telemetry.traffic import CHECKPOINTS
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder


class StoredPartsStrategy(AxisHooks):
    """Knows what this rank holds, and gives its state; who writes it is above."""

    data_axis: DataAxis
    is_placed = False
    """Whether each rank has got its part of a model."""

    @property
    def stores_shards(self) -> bool:
        """Whether ranks hold parts of the model, and checkpoints are directories of shards."""
        return self.data_axis.is_sharded

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self.stores_shards:
            return super().lightning_module_state_dict()
        if self._obstacle:
            return {}  # it will not be written, and what failed may be what is asked here
        self.refuse_unplaced()
        assert self.lightning_module is not None
        self.data_axis.synchronize()
        # The parameters themselves: tied ones are known by being one object.
        state: dict[str, Any] = self.lightning_module.state_dict(keep_vars=True)
        stored = {name: each for name, each in state.items() if self.stores(name)}
        return self._as_parts(stored)

    def refuse_unplaced(self) -> None:
        """Refuse to give what this rank holds before ranks have met and hold something.

        Raises:
            CheckpointError: With what to write instead.
        """
        if not (self.is_placed and dist.is_initialized()):
            raise CheckpointError(
                f"Trainer.save_checkpoint was called outside of a run: {self.public_name} "
                f"writes what each of its ranks holds, and they meet in Trainer.fit, validate, "
                f"test or predict. Call it after one of these, or store the module as it is with "
                f"torch.save({{'state_dict': module.state_dict()}}, path)."
            )

    def _as_parts(self, state: dict[str, Any]) -> dict[str, Any]:
        """Say of plain tensors that are parts what they are parts of; tied ones stay one object."""
        parts: dict[int, TensorPart] = {}
        for name, each in state.items():
            division = self.division(name)
            if division is not None and id(each) not in parts:
                parts[id(each)] = TensorPart.of(each, division)
        return {name: parts.get(id(each), each) for name, each in state.items()}

    def whole_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's state for another process. Collective over all ranks.

        Args:
            state_dict: Of the module; gives what this rank has.
        """
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in state_dict().items()
        }

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self.stores_shards:
            return super().optimizer_state(optimizer)
        if self._obstacle:
            return {}
        assert self.lightning_module is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state = named_state(self.lightning_module, optimizer, divide=self.division)
        return self.join_state(state)

    @property
    def _obstacle(self) -> str | None:
        """Why nothing can be saved, of a run that is ending by an error, which is to be seen."""
        if self._is_alone:
            return "a checkpoint of shards needs all ranks"
        if self._is_failing and not self.data_axis.has_whole_steps:
            return "its last step is half done"
        return None

    @property
    def _is_failing(self) -> bool:
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def _is_alone(self) -> bool:
        """Whether this rank is on its way out by an error, and others may be anywhere."""
        return self._is_failing and self.world_size > 1


AFTER_SAVING = "Trainer.save_checkpoint"
"""What the Trainer calls the barrier after a save."""


class SavingStrategy(StoredPartsStrategy):
    """Saves; what is saved is below, and loading above."""

    recorder: Recorder | NullRecorder
    _resume: ResumeManager | None
    _sigterm: SigtermAgreement | None

    async_save = False
    """Whether checkpoints are written beside training."""
    _beside: AsyncSave | None = None
    _saving_group: ProcessGroup | None = None

    @property  # type: ignore[explicit-override]
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif is_wrapping(self._checkpoint_io):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # type: ignore[attr-defined]
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if self.stores_shards:
            instead = " and give the strategy async_save=True" if is_wrapping(io) else ""
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
            trainer = trainer_of(self.lightning_module)
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
                if self._saves_beside and not is_for_requeue(filepath):
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
            self._beside = AsyncSave()
            self._saving_group = dist.new_group(
                backend="gloo", timeout=timeout, group_desc="checkpoints"
            )
            self.recorder.name_group(self._saving_group, CHECKPOINTS)

    @property
    def _saves_beside(self) -> bool:
        """Whether there is something beside which a checkpoint can be written."""
        trainer = trainer_of(self.lightning_module)
        return self._beside is not None and trainer is not None and is_in_fit(trainer)

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
            all_or_none(self._beside.wait)

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


class CheckpointingStrategy(SavingStrategy):
    """Saves and loads; everything else is the engine's."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self.stores_shards

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        check_weights_only(weights_only, checkpoint_path)
        self.finish_saving()
        checkpoint_path = self.broadcast(checkpoint_path)
        place = path_or_address(checkpoint_path)
        if self._is_directory(place):
            checkpoint = all_or_none(
                partial(load_directory, place, checks_files=self.is_global_zero)
            )
        elif type(self.checkpoint_io) is AtomicCheckpointIO:
            load = partial(load_file, place, is_mapped=self.stores_shards)
            # Hosts may have copies of their own.
            checkpoint = all_or_none(partial(load, checks_values=self.local_rank == 0))
        else:
            plugin = partial(super().load_checkpoint, checkpoint_path, True, **kwargs)
            checkpoint = all_or_none(plugin)
        trainer = trainer_of(self.lightning_module)
        if self._resume is not None and trainer is not None:
            self._resume.read(checkpoint, trainer, str(checkpoint_path))
        return checkpoint

    def _is_directory(self, place: str | Path) -> bool:
        """Whether it is one, on all ranks. Collective over all ranks."""
        found = all_or_none(partial(is_directory, place))
        if dist.is_initialized() and self.world_size > 1:
            told = [found] * self.world_size
            dist.all_gather_object(told, found)
            if not all(told) and any(told):
                raise CheckpointError(
                    f"{place} is a directory for rank {told.index(True)}, and rank "
                    f"{told.index(False)} does not see it. Resume from a folder that all machines "
                    f"share, and not from memory://, which each process has for itself."
                )
        return found

    @override
    def load_model_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, **kwargs: Any
    ) -> None:
        state: dict[str, Any] = checkpoint["state_dict"]
        is_stored_in_shards = any(isinstance(each, Placeholder) for each in state.values())
        if not self.stores_shards and not is_stored_in_shards:
            super().load_model_state_dict(checkpoint, strict, **kwargs)
            return
        assert self.lightning_module is not None
        load = partial(self._load_model_state, self.lightning_module, state, strict=strict)
        all_or_none(load)
        self.data_axis.parameters_loaded()

    def _load_model_state(
        self, module: LightningModule, state: Mapping[str, Any], *, strict: bool
    ) -> None:
        module.load_state_dict(
            {key: self._own_part(key, each) for key, each in state.items()}, strict=strict
        )

    def _own_part(self, name: str, value: Any) -> Any:
        division = self.division(name)
        part = held(value) if division is None else divided(value, division, name)
        return part if self.holds(name) else passed_over(part)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if not self.stores_shards and not any(map(is_named, states)):
            super().load_optimizer_state_dict(checkpoint)
            return
        module = self.lightning_module
        assert module is not None
        for optimizer in self.optimizers:
            self.data_axis.prepare_state(optimizer)
        take = self.take_pending()
        load = partial(
            load_states,
            module,
            self.optimizers,
            states,
            holds=self.holds,
            take=take,
            divide=self.division,
        )
        all_or_none(load)
        for optimizer in self.optimizers:
            self.data_axis.state_loaded(optimizer)
