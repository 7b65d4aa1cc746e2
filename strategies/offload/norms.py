"""The norm of gradients that the engine holds, over all ranks."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from boltmesh.strategies.clipping import tensor_norm


class Weighed(Protocol):
    """Gradients, or what is known of them."""

    def square(self) -> float:
        """The sum of squares of what this rank counts."""

    def tensors(self) -> list[Tensor]:
        """The gradients that this rank counts."""


def joint_norm(
    gradients: Sequence[Weighed],
    norm_type: float,
    groups: Sequence[ProcessGroup],
    device: torch.device,
) -> float | None:
    """Return the norm of gradients of which each rank holds parts.

    Collective over ``groups``. None without a gradient and without other ranks to ask. Sums are
    kept in float64: whether a step is clipped must not depend on how many ranks there are.
    """
    if not gradients and not groups:
        return None
    if norm_type == 2.0:
        total = math.fsum(each.square() for each in gradients)
    else:
        norms = [float(tensor_norm(t, norm_type)) for each in gradients for t in each.tensors()]
        if math.isinf(norm_type):
            total = max(norms, default=0.0)
        else:
            total = math.fsum(norm**norm_type for norm in norms)
    joint = torch.tensor(total, dtype=torch.float64, device=device)
    is_maximum = math.isinf(norm_type)
    for group in groups:
        dist.all_reduce(joint, dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM, group=group)
    total = joint.item()
    return total if is_maximum else float(total ** (1 / norm_type))
