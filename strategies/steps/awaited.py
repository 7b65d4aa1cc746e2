"""What a step may ask of the Trainer before a run has it: optimizers and their schedules.

A model is divided by a look at what its step does with the first batch, and
``configure_optimizers`` is called when it is divided. Steps that log the learning rate ask for
optimizers all the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override


class _Same(list[Any]):
    """A list that has its one item at every place."""

    @override
    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else super().__getitem__(0)


class _Group(dict[str, Any]):
    """A parameter group that has every option."""

    def __missing__(self, key: str) -> Any:
        return _Same([0.0]) if key == "betas" else 0.0


class _AwaitedOptimizer(Optimizer):
    def __init__(self, module: Module) -> None:
        super().__init__(list(module.parameters()), {"lr": 0.0})
        self.param_groups = _Same([_Group(self.param_groups[0])])


@contextmanager
def optimizers_awaited(strategy: Strategy, module: Module) -> Iterator[None]:
    """Within, a step finds an optimizer and a schedule whose rates are 0, where there are none yet.

    Args:
        strategy: Of the run.
        module: What the step belongs to.
    """
    if strategy.optimizers or next(module.parameters(), None) is None:
        yield
        return
    optimizer = _AwaitedOptimizer(module)
    schedule = LambdaLR(optimizer, lambda _: 0.0)
    schedule.get_last_lr = lambda: _Same([0.0])  # type: ignore[method-assign]
    before = strategy.lr_scheduler_configs
    strategy.optimizers = [optimizer]
    strategy.lr_scheduler_configs = [LRSchedulerConfig(schedule)]
    try:
        yield
    finally:
        strategy.optimizers = []
        strategy.lr_scheduler_configs = before
