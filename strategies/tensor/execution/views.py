"""What stands in the place of a parameter while its module runs.

A parameter is a plain tensor that DDP, FSDP2 and optimizers know. What its use needs beside that
(its gradient summed over the ranks, a bias that is added later) is a differentiable view of it,
which the module finds under the parameter's name as long as its forward lasts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.strategies.tensor.execution.changes import Around
from boltmesh.strategies.tensor.execution.collectives import reduce_gradient
from boltmesh.strategies.tensor.execution.group import TensorGroup
from boltmesh.strategies.torch_compat import tree_map_only

_MISSING = object()


@contextmanager
def in_place_of(module: Module, views: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Let a module find views under the names of its parameters.

    Attributes of an instance are found before ``Module.__getattr__`` looks for parameters.
    """
    attributes = vars(module)
    before = {name: attributes.get(name, _MISSING) for name in views}
    attributes.update(views)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                del attributes[name]
            else:
                attributes[name] = value


def own_parameters(module: Module) -> dict[str, Parameter]:
    """Return a module's own parameters, never their views; what FSDP2 gathered where it has."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def summed_gradient(value: Tensor, group: TensorGroup) -> Tensor:
    """Return ``value`` for use with something divided: ranks have parts of its gradient."""
    if not (value.requires_grad and torch.is_grad_enabled()):
        return value
    return reduce_gradient(value, group)


@dataclass(frozen=True)
class PartialGradients:
    """Around a module whose whole parameters, or some of them, meet something divided."""

    module: Module
    """Whose parameters they are."""
    names: tuple[str, ...]
    group: TensorGroup

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        own = own_parameters(self.module)
        views = {name: summed_gradient(own[name], self.group) for name in self.names}
        with in_place_of(self.module, views):
            return forward(*args, **kwargs)


@dataclass(frozen=True)
class Boundary:
    """Around a module whose output is alike on all ranks, and meets something divided."""

    group: TensorGroup

    def __call__(self, forward: Around, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return map_floats(lambda each: summed_gradient(each, self.group), forward(*args, **kwargs))


def map_floats(function: Any, value: Any) -> Any:
    """Apply a function to the floating point tensors in a value, whose structure stays."""
    return tree_map_only(
        Tensor, lambda each: function(each) if each.is_floating_point() else each, value
    )
