"""What has to be equal for two batches to be run the same way."""

from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from types import CodeType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.strategies.steps.local_norms import with_inner
from boltmesh.strategies.steps.structure import is_constant, take_apart

EPOCH: Final = "current_epoch"
"""By which steps add a term from some epoch on, or leave a layer out."""

_FRAMEWORKS: Final = frozenset({"torch", "lightning"})

_PLAIN: Final = frozenset({int, float, bool, str, type(None)})


def step_signature(root: Module, parameters: Iterable[Parameter], step: str) -> Hashable:
    """Return the state that a step may depend on, for all microbatches of a batch.

    That is: train or eval mode, grad mode, autocast, which parameters are frozen, and the epoch
    where the module's own code names it.
    """
    device_type = next((each.device.type for each in parameters), "cpu")
    kind: Any = type(root)
    return (
        step,
        root.training,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        tuple([each.requires_grad for each in parameters]),
        getattr(root, EPOCH, 0) if _names_epoch(kind) else 0,
    )


@cache
def _names_epoch(kind: type) -> bool:
    """Whether the code of a class, less that of its frameworks, names the epoch."""
    own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in _FRAMEWORKS]
    codes = [getattr(each, "__code__", None) for one in own for each in vars(one).values()]
    written = [one for each in codes if isinstance(each, CodeType) for one in with_inner(each)]
    return any(EPOCH in each.co_names for each in written)


def batch_signature(value: Any) -> Hashable:
    """Return the nesting of a batch, shapes and types in it, and its numbers and strings."""
    kind = type(value)
    if kind is Tensor:  # first what nearly all batches are made of: this runs for each microbatch
        return value.shape, value.dtype, value.device, value.requires_grad
    if kind is tuple or kind is list:
        return kind, tuple(map(batch_signature, value))
    if kind is dict:
        return kind, tuple(value), tuple(map(batch_signature, value.values()))
    if kind in _PLAIN:
        return kind, value
    return tuple(map(_leaf, take_apart(value)[0])), _nesting(value)


def _nesting(value: Any) -> Hashable:
    """Return how a value is nested, down to the names of dictionary keys."""
    if isinstance(value, Mapping):
        return type(value), tuple((key, _nesting(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_nesting, value))
    return type(value).__qualname__


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype.str
    return (type(leaf).__qualname__, leaf if is_constant(leaf) else None)
