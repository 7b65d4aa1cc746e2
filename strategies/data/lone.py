"""A data axis of one rank: nothing is shared out, so nothing has to be kept alike."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from boltmesh.strategies.data.axis import AxisContext
from boltmesh.strategies.data.late import LateGradients
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic


class LoneRank(LateGradients):
    """The data axis of layouts that use their ranks for other axes."""

    @override
    def wrap(self, module: Module, context: AxisContext) -> Module:
        self.other_shares = context.norm_shares
        return module

    @override
    def no_sync(self, module: Module) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def before_manual_backward(self, module: Module, loss: Tensor) -> None:
        pass

    @override
    def after_manual_backward(self, module: Module) -> None:
        pass

    @override
    def begin_batch(self) -> None:
        pass

    @override
    def end_batch(self) -> bool:
        return False

    @override
    def pass_over_batch(self) -> bool:
        return False

    @override
    def expected_traffic(self, module: Module) -> list[ExpectedTraffic]:
        return []

    @override
    def expected_memory(self, module: Module, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        return []
