"""Finds optimizers whose step of one parameter depends on the gradients of others.

A rank of a pipeline has the gradients of its stages. Prodigy, D-Adaptation, or an Adam that clips
by a norm of its own would take those for all, and stages would step by different amounts.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from boltmesh.strategies.optimizer_trial import can_be_tried, trial_step

_SHAPE = (4, 6)
_STEPS = 4
"""Estimates made of earlier gradients show in the second step or later."""


def joins_gradients(optimizer: Optimizer) -> bool:
    """Whether a parameter's step depends on another one's gradient, as tried on two small ones.

    False where it cannot be tried: one that steps another optimizer within, and one that does not
    work on a small matrix. Of torch's own only LBFGS does.
    """
    if isinstance(optimizer, LBFGS):
        return True
    if not can_be_tried(optimizer):
        return False
    return any(_is_joint_in(optimizer, group) for group in optimizer.param_groups)


def _is_joint_in(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    try:
        one, other = (_stepped(optimizer, group, size) for size in (1.0, 1000.0))
    except Exception:  # noqa: BLE001 - it wants other parameters, which a real step will show
        return False
    return not torch.equal(one, other)


def _stepped(optimizer: Optimizer, group: Mapping[str, Any], size: float) -> Tensor:
    """Return a parameter after some steps beside another one with gradients of a size."""
    first, second = (Parameter(torch.ones(_SHAPE)) for _ in range(2))
    step = trial_step(optimizer, group, [first, second])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for those that draw
        for _ in range(_STEPS):
            first.grad, second.grad = torch.ones(_SHAPE), torch.full(_SHAPE, size)
            step()
    return first.detach()
