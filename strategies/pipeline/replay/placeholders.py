"""What a stage hands out for outputs of units that it does not run."""

import math

import torch
from torch import Tensor

from boltmesh.strategies.pipeline.replay.trace import TensorSpec


def placeholder(spec: TensorSpec, *, is_written: bool) -> Tensor:
    """Return a tensor that has the place of one that another stage has.

    Args:
        spec: Its layout.
        is_written: Whether the step writes into it. Otherwise all of its elements are one element
            in memory: it takes none, and a use that nobody foresaw is seen as NaN in the loss.
    """
    if is_written:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    is_inexact = spec.dtype.is_floating_point or spec.dtype.is_complex
    fill = math.nan if is_inexact else 0
    return torch.full((), fill, dtype=spec.dtype, device=spec.device).expand(spec.shape)
