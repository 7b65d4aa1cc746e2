"""What the engine asks of whatever fills the data axis: replicas now, shards with ZeRO."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer

from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic


class DataAxis(ABC):
    """Keeps the ranks of the data axis one model, whatever each of them holds of it."""

    @abstractmethod
    def wrap(self, module: Module, *, group: ProcessGroup, device: torch.device) -> Module:
        """Prepare the module for training and return what the forward pass goes through.

        Collective over ``group``: afterwards every rank has the parameters of its first rank.
        """

    @abstractmethod
    def no_sync(self, module: Module) -> AbstractContextManager[None]:
        """Keep gradients local, for all but the last batch of an accumulation window."""

    @abstractmethod
    def before_manual_backward(self, module: Module, loss: Tensor) -> None:
        """Called before each ``manual_backward``."""

    @abstractmethod
    def after_manual_backward(self, module: Module) -> None:
        """Called after each ``manual_backward``."""

    @abstractmethod
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        """What one optimizer step moves on one rank, its accumulated batches included."""

    @abstractmethod
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        """What memory one rank should need, by kind and place, once every state exists."""
