"""Finds hooks of the user's that take a norm of the gradients that one rank has."""

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm

from boltmesh.errors import ConfigError

_GRADIENT_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "configure_gradient_clipping",
    "optimizer_step",
)
_LOCAL_NORMS: dict[str, Callable[..., Any]] = {
    "grad_norm": grad_norm,
    "get_total_norm": torch.nn.utils.get_total_norm,
}


def refuse_local_norms(owner: object, *, sees: str) -> None:
    """Refuse hooks that would take one rank's gradients for the model's.

    Args:
        owner: The module, or a callback.
        sees: What such a hook would see, in words.

    Raises:
        ConfigError: Naming the hook and what to call instead.
    """
    for hook in _GRADIENT_HOOKS:
        function = getattr(type(owner), hook, None)
        if function is None or function.__module__.startswith("lightning."):
            continue
        for name, norm in _LOCAL_NORMS.items():
            if _uses(function, name, norm) and not hasattr(owner, name):
                raise ConfigError(
                    f"{type(owner).__name__}.{hook} calls {name}, which would see {sees}. Take "
                    f"trainer.strategy.gradient_norm(optimizer), the norm over all ranks of the "
                    f"model, and clip by self.clip_gradients or torch.nn.utils.clip_grad_norm_."
                )


def _uses(function: Any, name: str, target: object) -> bool:
    """Whether a function's own lines name another one, as a global or as an attribute."""
    code = getattr(function, "__code__", None)
    if code is None or not any(name in each.co_names for each in with_inner(code)):
        return False
    return function.__globals__.get(name, target) is target


def with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of those that are written within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from with_inner(each)
