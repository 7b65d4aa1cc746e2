"""A data axis of one rank: nothing is shared out, so nothing has to be kept alike."""

from collections.abc import Collection, Sequence

from torch.nn import Module, Parameter
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.data.axis import AxisContext
from boltmesh.strategies.data.late import LateGradients
from boltmesh.strategies.data.replica_memory import expected_held_memory
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic


class LoneRank(LateGradients):
    """The data axis of layouts that use their ranks for other axes."""

    _held: Collection[Parameter] | None = None

    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        self.other_shares, self._held = context.norm_shares, context.held
        return module

    @override
    def begin_batch(self) -> None:
        pass

    @override
    def _finish(self, *, has_loss: bool) -> bool:
        return False

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        return []

    @override
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        return expected_held_memory(module, optimizers, self._held)
