"""Remembers what units give, so that a second look at a batch's data does not run them again."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from boltmesh.strategies.pipeline.replay.trace import Argument, TensorSpec, UnitOutput
from boltmesh.strategies.steps.structure import is_constant, take_apart
from boltmesh.strategies.torch_compat import FakeTensorMode, is_fake, times_written

Key = tuple[Hashable, ...]


def key_of(unit: str, arguments: Any) -> Key | None:
    """Return what decides what a unit gives, None where an argument may hold more than it shows."""
    described: list[Hashable] = [unit]
    for leaf in take_apart(arguments)[0]:
        if isinstance(leaf, Tensor):
            layout = (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device)
            described.append((*layout, leaf.requires_grad, is_fake(leaf)))
        elif is_constant(leaf):
            described.append((type(leaf).__qualname__, leaf))
        else:
            return None
    return tuple(described)


def versions(arguments: Any) -> list[int]:
    """Return how often each tensor among arguments was written: a unit may change them."""
    leaves = take_apart(arguments)[0]
    return [
        times_written(leaf)
        for leaf in leaves
        if isinstance(leaf, Tensor) and not leaf.is_inference()
    ]


def recall(output: UnitOutput, arguments: Any, mode: FakeTensorMode) -> Any:
    """Return a result as a unit gave it before, on tensors without data."""
    given = take_apart(arguments)[0]
    leaves: list[Any] = []
    for made, needs_grad in zip(output.leaves, output.needs_grad, strict=True):
        if isinstance(made, Argument):
            leaves.append(given[made.index])
        elif isinstance(made, TensorSpec):
            with mode:
                tensor = torch.empty_strided(
                    made.shape, made.stride, dtype=made.dtype, device=made.device
                )
            # Not a leaf: code between units may change it in place.
            leaves.append(tensor.requires_grad_().clone() if needs_grad else tensor)
        else:
            leaves.append(made)
    return output.build(leaves)
