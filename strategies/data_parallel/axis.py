"""Two bases for the data axis: beside a pipeline, and of one rank.

The stages of a pipeline run pieces of the LightningModule, several microbatches at once, and hand
the gradients of a batch over when all of them are made. So there is no forward pass of the module
that a data axis could go along with: it is called when a batch begins, and when its gradients are
in ``.grad``.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.data_parallel.expected_memory import expected_held_memory
from boltmesh.strategies.engine.data_axis import AxisContext, DataAxis
from boltmesh.strategies.patch import patched
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic


class PipelineDataAxis(DataAxis):
    """A data axis that can be used where the gradients of a batch come all at once."""

    has_late_gradients = True

    is_synchronised = True
    """Whether the batch is the last one of an accumulation window."""

    @override
    @contextmanager
    def no_sync(self, module: Module) -> Iterator[None]:
        with patched(self, is_synchronised=False):
            yield

    @abstractmethod
    def begin_batch(self) -> None:
        """Called before each batch of training. Collective over the axis."""

    def end_batch(self) -> bool:
        """Called within the backward pass of a batch, when its gradients are in ``.grad``.

        Collective over the axis for the last batch of an accumulation window, as ``no_sync`` tells.

        Returns:
            Whether ``.grad`` holds averages over several ranks now.

        Raises:
            DivergenceError: When another rank has no loss for its batch.
        """
        return self.finish_batch(has_loss=True)

    def pass_over_batch(self) -> bool:
        """Called in the place of ``end_batch`` where a batch gave no loss. Collective likewise.

        Raises:
            DivergenceError: When another rank has one.
        """
        return self.finish_batch(has_loss=False)

    @abstractmethod
    def finish_batch(self, *, has_loss: bool) -> bool:
        """Average what is due after a batch; return whether ``.grad`` holds averages now."""


class SingleRankAxis(PipelineDataAxis):
    """The data axis of layouts that use their ranks for other axes: nothing is shared."""

    _held: Collection[Parameter] | None = None

    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        self.other_shares, self._held = context.norm_shares, context.held
        return module

    @override
    def share_weights(self, module: Module) -> None:
        pass

    @override
    def begin_batch(self) -> None:
        pass

    @override
    def finish_batch(self, *, has_loss: bool) -> bool:
        return False

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        return []

    @override
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        return expected_held_memory(module, optimizers, self._held)
