"""The data axis of layouts that use all their ranks for other axes."""

from collections.abc import Collection, Sequence

from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.data_parallel.expected_memory import expected_held_memory
from boltmesh.strategies.engine.data_axis import AxisContext, DataAxis
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic


class SingleRankAxis(DataAxis):
    """A data axis of one rank: nothing is sharded, and nothing averaged."""

    has_late_gradients = True

    _held: Collection[Parameter] | None = None

    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        self.other_shares, self._held = context.norm_shares, context.held
        return module

    @override
    def share_weights(self, module: Module) -> None:
        pass

    def before_batch(self) -> None:
        """Do nothing: the parameters are there."""

    def reduce_gradients(self, *, has_loss: bool) -> bool:
        """Return that nothing was averaged."""
        return False

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        return []

    @override
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        return expected_held_memory(module, optimizers, self._held)
