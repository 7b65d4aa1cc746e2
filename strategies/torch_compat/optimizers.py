"""Steps of optimizers, gradient scaling and clipping, and replacements of their methods."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Optimizer, Rprop
from typing_extensions import override

from boltmesh.strategies.patch import patched


def fused_adam(*, is_decoupled: bool) -> Any:
    """Return torch's fused Adam kernel; only the optimizer around it is public."""
    return torch._fused_adamw_ if is_decoupled else torch._fused_adam_


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device and dtype in place by a scalar tensor, in few kernels."""
    torch._foreach_mul_(tensors, factor)


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def step_without_hooks(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the class's ``step``, which runs no step hooks; a base's, that it calls, does not."""
    step: Any = type(optimizer).step
    beneath = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step

    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        kept = {name: each for name, each in vars(optimizer).items() if name in _STEP_HOOKS}
        vars(optimizer).update({name: OrderedDict() for name in kept})
        try:
            return beneath(optimizer, *args, **kwargs)
        finally:
            vars(optimizer).update(kept)

    return run


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same attributes; lists, dicts and sets are copied.

    torch's own copies only have groups and state.
    """
    made: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        vars(made)[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    return made


class _Bare(Optimizer):
    """Has no attributes of its own. An instance of a class of torch would hook the class's step."""

    def __init__(self) -> None:
        super().__init__([Parameter(torch.empty(0))], {})

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes without those of torch and of schedulers."""
    known = (*vars(_Bare()), "step", "zero_grad", "_opt_called")
    return {name: value for name, value in vars(optimizer).items() if name not in known}


_PLAIN = (bool, int, float, str, tuple, type(None))


def plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers, words and tuples in an optimizer's group."""
    return {key: value for key, value in group.items() if isinstance(value, _PLAIN)}


def restore_plain_settings(group: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Restore ``plain_settings`` of a group; those that a step has added are removed."""
    for key in plain_settings(group).keys() - before.keys():
        del group[key]
    group.update(before)


def lacks_shard_rules(optimizer: Optimizer) -> bool:
    """Whether a step of torch's own fails on shards: DTensor lacks rules for its operators."""
    if isinstance(optimizer, (SGD, Adagrad)):
        return any(group.get("fused") for group in optimizer.param_groups)
    return isinstance(optimizer, Rprop)


def stop_scaling_in_step(optimizer: Optimizer) -> Callable[[], None]:
    """Make a gradient scaler unscale the gradients of a fused optimizer before its step.

    Returns:
        A function that undoes this.
    """
    marked = vars(optimizer).pop("_step_supports_amp_scaling", None)

    def restore() -> None:
        if marked is not None:
            optimizer._step_supports_amp_scaling = marked  # type: ignore[attr-defined]

    return restore


class OverflowAgreement:
    """Makes a gradient scaler skip a step on all ranks of a group if one of them must.

    DTensor decides by the first gradient alone whether ranks must agree; if that is of a replicated
    parameter, they would not.
    """

    def __init__(self) -> None:
        self._restore: Callable[[], None] | None = None

    def begin(
        self,
        scaler: torch.amp.GradScaler | None,
        group: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> None:
        """Make ranks agree until ``end``; no-op without a scaler or without other ranks.

        Args:
            scaler: The scaler of this rank.
            group: Ranks that step together.
            device: Device of the gradients; if given, a rank without gradients takes part, which a
                scaler would otherwise refuse to step.
        """
        self.end()
        if scaler is None or group.size() == 1:
            return
        attributes = vars(scaler)
        unscale: Any = scaler._unscale_grads_
        before = attributes.get("_unscale_grads_")  # of another axis, whose ranks agree, too

        def unscale_and_agree(*args: Any, **kwargs: Any) -> Any:
            overflows: dict[torch.device, Tensor] = unscale(*args, **kwargs)
            if device is not None:
                overflows.setdefault(device, torch.zeros((), device=device))
            for each in overflows.values():
                dist.all_reduce(each, dist.ReduceOp.MAX, group=group)
            return overflows

        def restore() -> None:
            attributes.pop("_unscale_grads_", None)
            if before is not None:
                attributes["_unscale_grads_"] = before

        attributes["_unscale_grads_"] = unscale_and_agree
        self._restore = restore

    def end(self) -> None:
        """Let the scaler decide alone again."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()


TOTAL_NORM: Callable[..., Tensor] = torch.nn.utils.clip_grad._get_total_norm
"""Norm by which ``torch.nn.utils.clip_grad_norm_`` clips the gradients that it is given."""


_SCALE_TO_NORM: Callable[..., None] = torch.nn.utils.clip_grad._clip_grads_with_norm_


def total_norm_replaced(
    total_norm: Callable[..., Tensor], check: Callable[[Sequence[Tensor]], None] | None = None
) -> AbstractContextManager[None]:
    """Context in which ``torch.nn.utils.clip_grad_norm_`` clips by another norm.

    Also if it was imported by name.

    Args:
        total_norm: Replacement for ``TOTAL_NORM``.
        check: Called between norm and scaling with the given parameters, also those without a
            gradient; may raise.
    """

    def scale(parameters: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        if check is not None:
            check(parameters)
        _SCALE_TO_NORM(parameters, *args, **kwargs)

    return patched(
        torch.nn.utils.clip_grad, _get_total_norm=total_norm, _clip_grads_with_norm_=scale
    )


def zeroed_by(optimizers: Sequence[Optimizer]) -> set[Parameter]:
    """Return the parameters whose gradients ``zero_grad`` of these optimizers removes."""
    return {
        each
        for optimizer in optimizers
        if _zeroes_as_torch_does(optimizer)
        for group in optimizer.param_groups
        for each in group["params"]
    }


def _zeroes_as_torch_does(optimizer: Optimizer) -> bool:
    """Whether ``zero_grad()`` is torch's, not overridden by class or instance."""
    is_own = "zero_grad" in vars(optimizer)
    return not is_own and type(optimizer).zero_grad is Optimizer.zero_grad


def patch_optimizer(
    optimizer: Optimizer,
    *,
    step: Callable[[Optimizer], None],
    discard: Callable[[Optimizer, bool], None],
    absorb: Callable[[Optimizer], None],
) -> Callable[[], None]:
    """Replace methods of an optimizer; the object, its groups and hooks stay.

    Args:
        optimizer: The user's optimizer.
        step: Called in place of the class's ``step``, after the closure and between step hooks.
        discard: Called before ``zero_grad``; True if gradients are kept as zeros.
        absorb: Called after ``load_state_dict``.

    Returns:
        A function that restores the methods.
    """
    zero_grad = optimizer.zero_grad
    before: Any = vars(optimizer).get("step")

    def new_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Schedulers read this to warn of steps that were never made.
        self._opt_called = True  # type: ignore[attr-defined]
        step(self)
        return loss

    def new_zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        discard(self, not set_to_none)
        zero_grad(set_to_none=set_to_none)

    hooked: Any = Optimizer.profile_hook_step(new_step)
    if hasattr(before, "_wrapped_by_lr_sched"):  # schedulers know a step that they have wrapped
        hooked._wrapped_by_lr_sched = before._wrapped_by_lr_sched
    # Schedulers wrap the function of a bound method.
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
