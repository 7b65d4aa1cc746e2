"""What the axes that divide a model tell the engine, and what holds where none does.

The data axis is a part of its own (``data/axis.py``), which every engine has. The pipeline and the
tensor axis answer these hooks in ``pipeline_mesh.py`` and ``tensor_mesh.py``; where both are there,
each hands on to the other by ``super()``.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.strategies.checkpoint.chunks import DimDivision
from boltmesh.strategies.checkpoint.optimizer_state import Take
from boltmesh.strategies.grad_norm import NormShare


class AxisHooks(ParallelStrategy):
    """A strategy whose ranks all have the whole model; axes that divide it override this."""

    @property
    def public_name(self) -> str:
        """The class that users build, in messages and for who watches."""
        return type(self).__name__

    # Placing the model.

    def place(self, trainer: Trainer) -> None:
        """Put the model on the axes that divide it, before anything is moved or wrapped.

        Called at the beginning of ``setup``. Each axis lets the next inner one go first: stages
        are made of layers that are divided already. Collective over all ranks.
        """

    def refuse_remains(self, module: LightningModule) -> None:
        """Refuse to divide layers of a model of which this rank no longer has all layers.

        Raises:
            ConfigError: With what to do in which order.
        """

    def cut_into_stages(self, units: Mapping[str, Module]) -> None:
        """Prepare layers that are divided already for ranks that run some of them each.

        Args:
            units: What is run as a whole, by dotted name.
        """

    def without_communication(self) -> AbstractContextManager[None]:
        """Enter what layers are run in on tensors without data, by this rank alone."""
        return nullcontext()

    # What this rank has.

    def held_parameters(self) -> Collection[Parameter]:
        """The module's parameters of which this rank has values, shards among them."""
        return [] if self.lightning_module is None else list(self.lightning_module.parameters())

    def holds_buffer(self, name: str) -> bool:
        """Whether this rank has the model's value of a buffer, and not what it needs no longer."""
        return True

    def kept_beside(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Other versions of weights and gradients that this rank holds, beside the module's own."""
        return (), ()

    # Steps.

    def check_batch(self, batch: Any) -> None:
        """Raise where ranks that share the model were given another batch than this one.

        Called before every step with what ``batch_to_device`` has returned.
        """

    def norm_shares(self) -> list[NormShare]:
        """What the axes beside the data axis say of norms of gradients, innermost first."""
        return []

    # Checkpoints.

    divides_modules = False
    """Whether parameters are whole, and on some of the ranks each."""

    def holds(self, name: str) -> bool:
        """Whether this rank has a part of a parameter or buffer of the module."""
        return True

    def stores(self, name: str) -> bool:
        """Whether this rank writes what it has of it into checkpoints."""
        return True

    def division(self, name: str) -> DimDivision | None:
        """How a parameter is divided of which this rank has a part in a plain tensor; else None.

        Args:
            name: In the module's state; any name of a parameter that has several.
        """
        return None

    def join_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add to an optimizer's state what is stored once for all, and only other ranks have.

        Collective over all ranks.
        """
        return state

    def take_pending(self) -> Take | None:
        """Return what takes gradients that the saved run had not applied yet; None to drop them."""
        return None

    # Resuming.

    def kept_for_resume(self) -> dict[str, Any]:
        """What a checkpoint keeps of the strategy, beside random states and places in the data.

        Alike on all ranks; plain numbers and strings.
        """
        return {}

    def take_kept(self, state: dict[str, Any]) -> None:
        """Take what ``kept_for_resume`` gave in the run that is gone on with."""
