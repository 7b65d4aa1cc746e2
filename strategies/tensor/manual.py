"""Lets a step that optimises by hand run where there are no optimizers yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

_MANUAL = (
    *("optimizers", "lr_schedulers", "manual_backward", "toggle_optimizer", "untoggle_optimizer"),
    "clip_gradients",
)


@contextmanager
def by_hand(module: LightningModule) -> Iterator[dict[int, Tensor]]:
    """Within, a module optimises by stand-ins: backward passes run, and no parameter is stepped.

    Toggling freezes what it freezes. Gradients are collected where an optimizer would step.

    Args:
        module: With ``automatic_optimization = False``.

    Yields:
        The sum of the gradients of all steps, by identity of the parameter.
    """
    optimizers, schedulers = _configured(module)
    collected: dict[int, Tensor] = {}
    stand_ins = [_StandIn(each, collected) for each in optimizers]
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

    def one_or_all(found: list[Any]) -> Any:
        return found[0] if len(found) == 1 else found

    acts: dict[str, Any] = {
        "optimizers": lambda *_, **__: one_or_all(stand_ins),
        "lr_schedulers": lambda: one_or_all(schedulers) if schedulers else None,
        "manual_backward": backward,
        "toggle_optimizer": toggle,
        "untoggle_optimizer": untoggle,
        "clip_gradients": lambda *_, **__: None,
    }
    before = {name: vars(module)[name] for name in _MANUAL if name in vars(module)}
    vars(module).update(acts)
    try:
        yield collected
    finally:
        untoggle(None)
        for name in _MANUAL:
            del vars(module)[name]
        vars(module).update(before)


class _StandIn:
    """Looks like an optimizer and steps nothing."""

    def __init__(self, optimizer: Optimizer, collected: dict[int, Tensor]) -> None:
        self.optimizer = optimizer
        self._collected = collected

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None, **_: Any) -> None:
        """Take note of the gradients."""
        if closure is not None:
            closure()
        for each in _parameters(self.optimizer):
            if each.grad is not None:
                known = self._collected.get(id(each))
                grad = each.grad.detach()
                self._collected[id(each)] = grad.clone() if known is None else known + grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget them."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Nothing is synchronised here."""
        yield


class _Scheduler:
    """Looks like a scheduler that does not move."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self, *_: Any, **__: Any) -> None:
        """Stay."""


def _configured(module: LightningModule) -> tuple[list[Optimizer], list[Any]]:
    """Return what ``configure_optimizers`` makes, optimizers and schedulers."""
    found = module.configure_optimizers()
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], (list, tuple)):
        entries, schedulers = list(found[0]), list(found[1])
    else:
        entries, schedulers = list(found) if isinstance(found, (list, tuple)) else [found], []
    optimizers = []
    for each in entries:
        if isinstance(each, dict):
            optimizers.append(each["optimizer"])
            schedulers += [each["lr_scheduler"]] if each.get("lr_scheduler") else []
        elif each is not None:
            optimizers.append(each)
    kept = [each["scheduler"] if isinstance(each, dict) else each for each in schedulers]
    return optimizers, [_Scheduler(each) for each in kept]


def _parameters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]
