"""What a rank puts into a checkpoint: the whole model of a replica, or the parts that it holds.

The dictionaries that Lightning asks for. A part is a DTensor, or a plain tensor that is told to be
part of a larger one, so that a checkpoint holds everything where it lies in the whole.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerStatus
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.errors import CheckpointError
from boltmesh.strategies import lightning_compat as compat
from boltmesh.strategies.checkpoint.optimizer_state import named_state
from boltmesh.strategies.checkpoint.parts import Part
from boltmesh.strategies.data.axis import DataAxis
from boltmesh.strategies.engine.hooks import AxisHooks


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
        parts: dict[int, Part] = {}
        for name, each in state.items():
            division = self.division(name)
            if division is not None and id(each) not in parts:
                parts[id(each)] = Part.of(each, division)
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
        trainer = compat.trainer_of(self.lightning_module)
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def _is_alone(self) -> bool:
        """Whether this rank is on its way out by an error, and others may be anywhere."""
        return self._is_failing and self.world_size > 1
