"""Saving and loading of a strategy: one file of replicas, or a directory of all ranks' shards.

A strategy with the whole model on each rank writes files as Lightning does, but atomically. A
strategy with shards writes directories. Each rank reads the part that it holds from either.

A rank's part is a DTensor, or a plain tensor with its position in a larger one, so that a
checkpoint has each part at its position in the whole model. The axes know the positions.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.adapters import (
    PEFT,
    TRAINABLE_ONLY,
    fingerprints,
    frozen_names,
    peft_entries,
    reduced,
    refuse_other_base,
    refuse_other_names,
)
from boltmesh.strategies.checkpoint.async_save import AsyncSave, serialised
from boltmesh.strategies.checkpoint.chunks import DimDivision, TensorPart
from boltmesh.strategies.checkpoint.directory import (
    MODEL,
    is_directory,
    load_directory,
    prepare_save,
    save_directory,
)
from boltmesh.strategies.checkpoint.file import AtomicCheckpointIO, load_file, put_file, write_file
from boltmesh.strategies.checkpoint.optimizer_state import (
    joined_state,
    load_states,
    named_state,
)
from boltmesh.strategies.checkpoint.safe_load import check_weights_only
from boltmesh.strategies.checkpoint.shard_reader import divided, held, passed_over
from boltmesh.strategies.checkpoint.storage.addresses import path_or_address
from boltmesh.strategies.lightning_compat.trainer import (
    is_for_requeue,
    is_in_fit,
    trainer_of,
)
from boltmesh.strategies.object_collectives import all_or_none, gather_objects
from boltmesh.strategies.process_groups import temporary_group
from boltmesh.telemetry.traffic import CHECKPOINTS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from boltmesh.strategies.engine.strategy import MeshStrategy

AFTER_SAVING = "Trainer.save_checkpoint"
"""Name of the Trainer's barrier after a save."""


class Checkpointing:
    """Saves and loads the checkpoints of one strategy.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: "MeshStrategy") -> None:
        self._strategy = strategy
        self._beside: AsyncSave | None = None
        """Writes beside training; None outside of a fit with ``async_save``."""
        self._saving_group: ProcessGroup | None = None
        self._base: Mapping[str, str] | None = None
        """Fingerprints of the frozen parameters as training began, where saves leave them out."""
        self._resumed_base: Mapping[str, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Spawned ranks make their own threads and groups.
        return {**vars(self), "_beside": None, "_saving_group": None}

    # Parts of this rank.

    @property
    def _module(self) -> LightningModule:
        module = self._strategy.lightning_module
        assert module is not None
        return module

    def stores(self, name: str) -> bool:
        """Whether this rank writes its part of a parameter or buffer into checkpoints."""
        return all(axis.stores(name) for axis in self._strategy.axes)

    def division(self, name: str) -> DimDivision | None:
        """Return how a parameter is divided, see ``Axis.division``."""
        divisions = (axis.division(name) for axis in self._strategy.axes)
        return next((division for division in divisions if division is not None), None)

    def keeps_whole_state(self, parameter: Tensor) -> bool | None:
        """Whether this rank keeps whole state, see ``Axis.keeps_whole_state``."""
        flags = (axis.keeps_whole_state(parameter) for axis in self._strategy.axes)
        return next((owns for owns in flags if owns is not None), None)

    def model_state(self) -> dict[str, Any]:
        """Return this rank's parts of the model's state, by name. Collective over all ranks.

        DTensors, ``TensorPart`` with the shape of the full tensor, or whole tensors.

        Raises:
            CheckpointError: Before the first run.
        """
        strategy = self._strategy
        if self._obstacle:
            return {}  # it will not be written, and the calls below may be those that failed
        self._refuse_unplaced()
        strategy.drain()
        with self._opened():
            strategy.data_axis.synchronize()
            # The parameters themselves: tied ones are recognised as one object.
            state: dict[str, Any] = self._module.state_dict(keep_vars=True)
            stored = {name: each for name, each in state.items() if self.stores(name)}
            return self._as_parts(stored)

    def begin_training(self) -> None:
        """Hash the frozen parameters that saves leave out. Collective over all ranks."""
        module = self._strategy.lightning_module
        if self._strategy.save_trainable_only and module is not None:
            base = self._fingerprints(frozen_names(module))
            self._base = base if self._resumed_base is None else self._resumed_base
            self._resumed_base = None

    def _fingerprints(
        self, names: Collection[str], expected: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        is_shared = self._strategy.stores_shards  # else the module may not be placed yet
        state = self.model_state() if is_shared else self._module.state_dict()
        chosen = {name: state[name] for name in names if name in state}
        return fingerprints(chosen, expected, is_shared=is_shared)

    def _opened(self) -> ExitStack:
        """Return a context in which ``state_dict`` gives this rank's parts of the model."""
        stack = ExitStack()
        for axis in self._strategy.axes:
            stack.enter_context(axis.opened())
        return stack

    def _refuse_unplaced(self) -> None:
        strategy = self._strategy
        if not (strategy.is_placed and dist.is_initialized()):
            raise CheckpointError(
                f"Trainer.save_checkpoint was called outside of a run: {strategy.public_name} "
                f"writes what each of its ranks holds, and they meet in Trainer.fit, validate, "
                f"test or predict. Call it after one of these, or store the module as it is with "
                f"torch.save({{'state_dict': module.state_dict()}}, path)."
            )

    def _as_parts(self, state: dict[str, Any]) -> dict[str, Any]:
        """Wrap plain tensors that are parts in ``TensorPart``; tied ones stay one object."""
        parts: dict[int, TensorPart] = {}
        for name, each in state.items():
            division = self.division(name)
            if division is not None and id(each) not in parts:
                parts[id(each)] = TensorPart.of(each, division)
        return {name: parts.get(id(each), each) for name, each in state.items()}

    def whole_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's state with whole tensors. Collective over all ranks.

        Args:
            state_dict: Returns this rank's state of the module.
        """
        with self._opened():
            whole = {
                name: value.full_tensor() if isinstance(value, DTensor) else value
                for name, value in state_dict().items()
            }
        for axis in reversed(self._strategy.axes):
            whole = axis.join_model_state(whole)
        return whole

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's part of an optimizer's state. Collective over all ranks."""
        if self._obstacle:
            return {}
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        module = self._module
        state = named_state(
            module, optimizer, divide=self.division, keeps_whole=self.keeps_whole_state
        )
        owned = {
            name: self.keeps_whole_state(each)
            for name, each in module.named_parameters(remove_duplicate=False)
        }
        if any(each is not None for each in owned.values()):  # on all ranks
            state = joined_state(state, lambda name: owned.get(name) is not False)
        for axis in self._strategy.axes:
            state = axis.join_optimizer_state(state)
        return state

    @property
    def _obstacle(self) -> str | None:
        """Why a run that ends by an error cannot save; None if it can."""
        if self.is_alone:
            return "a checkpoint of shards needs all ranks"
        if self._is_failing and not self._strategy.data_axis.has_whole_steps:
            return "its last step is half done"
        return None

    @property
    def _is_failing(self) -> bool:
        trainer = trainer_of(self._strategy.lightning_module)
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def is_alone(self) -> bool:
        """Whether this rank ends by an error while others may be at any other point."""
        return self._is_failing and self._strategy.world_size > 1

    # Saving.

    def save(
        self,
        checkpoint: dict[str, Any],
        filepath: _PATH,
        storage_options: Any | None,
        *,
        write_file: Callable[..., None],
    ) -> None:
        """Write a checkpoint, or begin to. Collective over all ranks.

        Args:
            checkpoint: The checkpoint of the Trainer.
            filepath: A file or a directory.
            storage_options: For a checkpoint plugin.
            write_file: Lightning's implementation, for a model that each rank has whole.
        """
        strategy = self._strategy
        with strategy.recorder.phase("checkpoint"):
            trainer = trainer_of(strategy.lightning_module)
            if strategy.stores_shards and (obstacle := self._obstacle):
                text = f"{filepath} was not written: the run is ending by an error, and {obstacle}."
                warnings.warn(f"{text} The one before it is intact.", stacklevel=3)
                return
            if strategy.resume is not None and trainer is not None:
                checkpoint = strategy.resume.store(checkpoint, trainer)
            copies = strategy.memory_checkpoints
            if copies is not None and copies.is_own(filepath):
                copies.save(checkpoint, filepath)
                return
            checkpoint = self._reduced(checkpoint)
            with nullcontext() if strategy.sigterm is None else strategy.sigterm.saving():
                self.finish()
                if self._writes_beside and not is_for_requeue(filepath):
                    self._begin_to_save(checkpoint, filepath, storage_options)
                    return
                if strategy.stores_shards:
                    place = self._place_of_all(filepath, storage_options)
                    save_directory(checkpoint, place, is_divided=strategy.divides_modules)
                else:
                    write_file(checkpoint, filepath, storage_options)
        if strategy.is_global_zero:
            strategy.recorder.event("checkpoint", str(filepath))

    def _reduced(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint with entries for adapters, and without the base if so set."""
        module = self._strategy.lightning_module
        if module is not None:
            with self._opened():  # peft reads state_dict of modules that it saves whole
                entries = peft_entries(module)
            checkpoint = {**checkpoint, PEFT: entries} if entries else checkpoint
        if self._base is None or MODEL not in checkpoint:
            return checkpoint
        frozen = {name: each for name, each in checkpoint[MODEL].items() if name in self._base}
        now = fingerprints(frozen, self._base, is_shared=self._strategy.stores_shards)
        return reduced(checkpoint, self._base, now)

    def open(self) -> None:
        """Start the thread and the group of saves beside training. Collective over all ranks."""
        if self._beside is None:
            self._beside = AsyncSave()
            timeout = self._strategy.timeout
            group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
            self._saving_group = temporary_group(group, self._strategy)
            self._strategy.recorder.name_group(group, CHECKPOINTS)

    @property
    def _writes_beside(self) -> bool:
        """Whether a checkpoint is written beside training now."""
        trainer = trainer_of(self._strategy.lightning_module)
        return self._beside is not None and trainer is not None and is_in_fit(trainer)

    def _begin_to_save(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None
    ) -> None:
        """Copy this rank's state and start to write it. Collective over all ranks."""
        strategy = self._strategy
        assert self._beside is not None
        assert self._saving_group is not None
        place = self._place_of_all(filepath, storage_options)
        if strategy.stores_shards:
            group, is_divided = self._saving_group, strategy.divides_modules
            write = prepare_save(checkpoint, place, group, is_divided=is_divided)
        elif strategy.is_global_zero:
            write = partial(_write_file, place, serialised(checkpoint))
        else:
            return
        note = partial(strategy.recorder.event, "checkpoint", str(filepath))
        behind = [note] if strategy.is_global_zero else []
        self._beside.start(write, *behind)

    def finish(self) -> None:
        """Wait until the checkpoint that is written beside training is complete.

        Collective over all ranks. Does nothing without one.

        Raises:
            CheckpointError: It could not be written; raised on every rank.
        """
        if self._beside is not None:
            all_or_none(self._beside.wait)

    def close(self) -> None:
        """Wait for this rank's writes at the end of its run; other ranks may have ended."""
        if self._strategy.memory_checkpoints is not None:
            self._strategy.memory_checkpoints.close()
        beside, self._beside, self._saving_group = self._beside, None, None
        if beside is not None:
            try:
                beside.wait()
            except Exception as error:  # noqa: BLE001 - must not hide the error that ends the run
                warnings.warn(f"The last checkpoint is not there: {error}", stacklevel=2)

    def remove(self, filepath: _PATH) -> None:
        """Delete a checkpoint, after the one that replaces it is complete."""
        strategy = self._strategy
        if not strategy.is_global_zero:
            return
        remove = partial(strategy.checkpoint_io.remove_checkpoint, filepath)
        if self._beside is None:
            remove()
        else:
            self._beside.then(remove)

    def _place_of_all(self, filepath: _PATH, storage_options: Any | None) -> str | Path:
        """Return the path of a checkpoint that the ranks themselves write. Collective."""
        if storage_options is not None:
            is_sharded = self._strategy.stores_shards
            what = "a checkpoint of shards" if is_sharded else "async_save=True"
            raise CheckpointError(
                f"{filepath} cannot be written with storage_options={storage_options!r}, which "
                f"are for a checkpoint plugin: {what} writes by itself. Leave them out, and give "
                f"fsspec what it needs by its own configuration."
            )
        return path_or_address(self._strategy.broadcast(filepath))

    # Loading.

    def load(
        self,
        checkpoint_path: _PATH,
        weights_only: bool | None,
        *,
        read_file: Callable[[_PATH], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return a checkpoint, with placeholders for tensors that are read later. Collective.

        Args:
            checkpoint_path: A file or a directory.
            weights_only: The Trainer's argument.
            read_file: Reads a file by the user's checkpoint plugin.

        Raises:
            CheckpointError: It is damaged, some ranks do not see it, or this layout cannot resume.
        """
        strategy = self._strategy
        check_weights_only(weights_only, checkpoint_path)
        self.finish()
        copies = strategy.memory_checkpoints
        copied = None if copies is None else copies.place_of(checkpoint_path)
        checkpoint_path = strategy.broadcast(checkpoint_path)
        place = copied or path_or_address(checkpoint_path)
        if self._is_directory(place):
            checkpoint = all_or_none(
                partial(load_directory, place, checks_files=strategy.is_global_zero)
            )
        elif type(strategy.checkpoint_io) is AtomicCheckpointIO:
            load = partial(load_file, place, is_mapped=strategy.stores_shards)
            # Each host checks values: it may have its own copy of the file.
            checkpoint = all_or_none(partial(load, checks_values=strategy.local_rank == 0))
        else:
            checkpoint = all_or_none(partial(read_file, checkpoint_path))
        trainer = trainer_of(strategy.lightning_module)
        if strategy.resume is not None and trainer is not None:
            strategy.resume.read(checkpoint, trainer, str(checkpoint_path))
        self._resumed_base = checkpoint.get(TRAINABLE_ONLY)
        return checkpoint

    def _is_directory(self, place: str | Path) -> bool:
        """Whether the path is a directory, on all ranks. Collective over all ranks."""
        is_here = all_or_none(partial(is_directory, place))
        if dist.is_initialized() and self._strategy.world_size > 1:
            of_ranks = gather_objects(is_here)
            if not all(of_ranks) and any(of_ranks):
                raise CheckpointError(
                    f"{place} is a directory for rank {of_ranks.index(True)}, and rank "
                    f"{of_ranks.index(False)} does not see it. Resume from a folder that all "
                    f"machines share, and not from memory://, which each process has for itself."
                )
        return is_here

    def load_model_state(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's parts of the model. Collective over all ranks.

        Args:
            checkpoint: Checkpoint whose model state has placeholders, or whole tensors, by name.
            strict: See ``Module.load_state_dict``.

        Raises:
            CheckpointError: Frozen parameters, which the checkpoint leaves out, differ.
        """
        state = checkpoint[MODEL]
        if TRAINABLE_ONLY in checkpoint:
            self._check_base(checkpoint[TRAINABLE_ONLY], state, checks_names=strict)
            strict = False

        def load() -> None:
            own = {key: self._own_part(key, each) for key, each in state.items()}
            self._module.load_state_dict(own, strict=strict)

        all_or_none(load)
        self._strategy.data_axis.parameters_loaded()

    def _check_base(
        self, base: Mapping[str, str], state: Mapping[str, Any], *, checks_names: bool
    ) -> None:
        own = self._fingerprints(base, base)

        def check() -> None:
            if not self._strategy.stores_shards and not self._strategy.is_global_zero:
                return  # the other ranks get the first one's weights before training
            if checks_names:
                with self._opened():
                    refuse_other_names(base, state, self._module.state_dict(keep_vars=True))
            refuse_other_base(base, own)

        all_or_none(check)

    def _own_part(self, name: str, value: Any) -> Any:
        division = self.division(name)
        part = held(value) if division is None else divided(value, division, name)
        return part if self._strategy.holds(name) else passed_over(part)

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's parts of all optimizers' states. Collective over all ranks."""
        strategy = self._strategy
        for optimizer in strategy.optimizers:
            strategy.data_axis.prepare_state(optimizer)
        pending = (axis.take_pending() for axis in strategy.axes)
        load = partial(
            load_states,
            self._module,
            strategy.optimizers,
            states,
            holds=strategy.holds,
            take=next((take for take in pending if take is not None), None),
            divide=self.division,
            keeps_whole=self.keeps_whole_state,
        )
        all_or_none(load)
        for optimizer in strategy.optimizers:
            strategy.data_axis.state_loaded(optimizer)


def _write_file(place: str | Path, data: bytes) -> None:
    if isinstance(place, Path):
        write_file(place, lambda file: file.write(data))
    else:
        put_file(place, data)
