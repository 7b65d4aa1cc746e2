"""What microbatches' losses are multiplied by, so that gradients fit into their types."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from boltmesh.strategies.pipeline.context import PipelineContext


def gradient_scale(context: "PipelineContext", num_microbatches: int) -> Tensor | float:
    """Return what the loss of each microbatch is multiplied by before its backward pass.

    A microbatch's mean has gradients that are larger than those of the whole batch's mean, by the
    number of microbatches, and fp16 would overflow where one process does not. They are divided by
    a power of two, which changes no bit of them, and multiplied by the scaler's scale.

    Args:
        context: Of the pipeline.
        num_microbatches: Of the batch.

    Returns:
        A number; or 0-dim fp32 on the device, where there is a scaler (asking would wait for it).
    """
    part = 0.5 ** (num_microbatches - 1).bit_length()
    if context.scaler is None:
        return part
    one = torch.ones((), device=context.device)
    scale: Tensor = context.scaler.scale(one) * part
    return scale
