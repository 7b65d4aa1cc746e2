"""Replaces what an optimizer's user calls: ``step`` and ``zero_grad`` of the instance."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from boltmesh.strategies.torch_compat.optimizers import stop_scaling_in_step

STEP_MARKS = ("_wrapped_by_lr_sched",)
"""What torch's schedulers put on ``step`` to know it again."""


def patch_optimizer(
    optimizer: Optimizer,
    *,
    step: Callable[[Optimizer], None],
    discard: Callable[[Optimizer, bool], None],
    absorb: Callable[[Optimizer], None],
) -> Callable[[], None]:
    """Let an optimizer's methods do something else; the object, its groups and hooks stay.

    Args:
        optimizer: The user's.
        step: Called in place of the class's ``step``, after the closure and between step hooks.
        discard: Called before ``zero_grad`` with whether gradients are kept, as zeros.
        absorb: Called after ``load_state_dict``.

    Returns:
        A function that puts everything back.
    """
    zero_grad = optimizer.zero_grad
    before = optimizer.__dict__.get("step")

    def new_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Schedulers look for this to warn of steps that were never made.
        self._opt_called = True  # type: ignore[attr-defined]
        step(self)
        return loss

    def new_zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        discard(self, not set_to_none)
        zero_grad(set_to_none=set_to_none)

    hooked: Any = Optimizer.profile_hook_step(new_step)
    for mark in STEP_MARKS:
        if before is not None and hasattr(before, mark):
            setattr(hooked, mark, getattr(before, mark))
    # Schedulers wrap the function under a bound method.
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = MethodType(new_zero_grad, optimizer)  # type: ignore[method-assign]
    restore_scaling = stop_scaling_in_step(optimizer)
    handle = optimizer.register_load_state_dict_post_hook(absorb)

    def restore() -> None:
        handle.remove()
        del optimizer.zero_grad
        del optimizer.step
        if before is not None:
            optimizer.step = before  # type: ignore[method-assign]
        restore_scaling()

    return restore
