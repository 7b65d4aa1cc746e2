"""How a strategy loads what it, or any other, has saved: a file or a directory of shards.

Each rank reads the part of the model that it holds, from either.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule
from typing_extensions import override

from boltmesh.errors import CheckpointError
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.checkpoint.directory import is_directory, load_directory
from boltmesh.strategies.checkpoint.file import load_file
from boltmesh.strategies.checkpoint.folders.addresses import path_or_address
from boltmesh.strategies.checkpoint.optimizer_state import is_named, load_states
from boltmesh.strategies.checkpoint.placeholder import Placeholder, divided, held, passed_over
from boltmesh.strategies.checkpoint.safe_load import check_weights_only
from boltmesh.strategies.checkpoint.together import together
from boltmesh.strategies.engine.saving import SavingStrategy


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
        place = path_or_address(checkpoint_path)
        if self._is_directory(place):
            checkpoint = together(partial(load_directory, place, checks_files=self.is_global_zero))
        elif isinstance(place, Path) and self.stores_shards:
            checkpoint = together(partial(load_file, place, is_mapped=True))
        else:
            load = partial(super().load_checkpoint, checkpoint_path, True, **kwargs)
            checkpoint = together(load)
        trainer = compat.trainer_of(self.lightning_module)
        if self._resume is not None and trainer is not None:
            self._resume.read(checkpoint, trainer, str(checkpoint_path))
        return checkpoint

    def _is_directory(self, place: str | Path) -> bool:
        """Whether it is one, on all ranks. Collective over all ranks."""
        found = together(partial(is_directory, place))
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
        together(load)
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
        together(load)
        for optimizer in self.optimizers:
            self.data_axis.state_loaded(optimizer)
