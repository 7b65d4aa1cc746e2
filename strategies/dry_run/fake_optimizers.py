"""Fake optimizers and schedulers, for steps that run before ``configure_optimizers``.

A model is divided after a dry run of its step on the first batch, and ``configure_optimizers`` is
called when it is divided. Steps under manual optimization, and steps that log the learning rate,
need optimizers before that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from boltmesh.strategies.patch import patched


class _Same(list[Any]):
    """A list that returns its one item for every index."""

    @override
    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else super().__getitem__(0)


class _AnyParamGroup(dict[str, Any]):
    """A parameter group that has every option."""

    def __missing__(self, key: str) -> Any:
        return _Same([0.0]) if key == "betas" else 0.0


class _LazyOptimizer(Optimizer):
    def __init__(self, module: Module) -> None:
        super().__init__(list(module.parameters()), {"lr": 0.0})
        self.param_groups = _Same([_AnyParamGroup(self.param_groups[0])])


@contextmanager
def fake_optimizers(strategy: Strategy, module: Module) -> Iterator[None]:
    """Context in which a step finds an optimizer and a schedule with rates of 0, if it has none.

    Args:
        strategy: The strategy of the run.
        module: The module of the step.
    """
    if strategy.optimizers or next(module.parameters(), None) is None:
        yield
        return
    optimizer = _LazyOptimizer(module)
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


@contextmanager
def manual_optimization_stub(module: LightningModule) -> Iterator[dict[int, Tensor]]:
    """Context in which a module under manual optimization runs backward passes but no steps.

    Toggling an optimizer freezes parameters as usual. Gradients are collected at each step.

    Args:
        module: With ``automatic_optimization = False``.

    Yields:
        The sum of the gradients of all steps, in the parameter's shape, by its identity.
    """
    optimizers, schedulers = _configured(module)
    collected: dict[int, Tensor] = {}
    stand_ins = [_FakeOptimizer(each, collected) for each in optimizers]
    toggled: dict[Any, bool] = {}

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def toggle(optimizer: Any) -> None:
        own = {id(each) for each in _parameters(optimizer)}
        for each in (parameter for other in optimizers for parameter in _parameters(other)):
            if id(each) not in own:
                toggled.setdefault(each, each.requires_grad)
                each.requires_grad_(False)

    def untoggle(optimizer: Any) -> None:
        for each, trains in toggled.items():
            each.requires_grad_(trains)
        toggled.clear()

    def one_or_all(items: list[Any]) -> Any:
        return items[0] if len(items) == 1 else items

    acts: dict[str, Any] = {
        "optimizers": lambda *_, **__: one_or_all(stand_ins),
        "lr_schedulers": lambda: one_or_all(schedulers) if schedulers else None,
        "manual_backward": backward,
        "toggle_optimizer": toggle,
        "untoggle_optimizer": untoggle,
        "clip_gradients": lambda *_, **__: None,
    }
    try:
        with patched(module, **acts):
            yield collected
    finally:
        untoggle(None)


class _FakeOptimizer:
    """An optimizer that steps nothing."""

    def __init__(self, optimizer: Optimizer, collected: dict[int, Tensor]) -> None:
        self.optimizer = optimizer
        self._collected = collected

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None, **_: Any) -> None:
        """Collect the gradients."""
        if closure is not None:
            closure()
        for each in _parameters(self.optimizer):
            if each.grad is not None:
                known = self._collected.get(id(each))
                grad = each.grad.detach()
                self._collected[id(each)] = grad.clone() if known is None else known + grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """No effect: nothing is synchronized here."""
        yield


class _FakeScheduler:
    """A scheduler that does not change the learning rate."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self, *_: Any, **__: Any) -> None:
        """No effect."""


def _configured(module: LightningModule) -> tuple[list[Optimizer], list[Any]]:
    """Return the optimizers and schedulers that ``configure_optimizers`` makes."""
    result = module.configure_optimizers()
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], (list, tuple)):
        entries, schedulers = list(result[0]), list(result[1])
    else:
        entries, schedulers = list(result) if isinstance(result, (list, tuple)) else [result], []
    optimizers = []
    for each in entries:
        if isinstance(each, dict):
            optimizers.append(each["optimizer"])
            schedulers += [each["lr_scheduler"]] if each.get("lr_scheduler") else []
        elif each is not None:
            optimizers.append(each)
    kept = [each["scheduler"] if isinstance(each, dict) else each for each in schedulers]
    return optimizers, [_FakeScheduler(each) for each in kept]


def _parameters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]
