"""Lets all ranks have gradients of the same parameters, where gradients come all at once."""

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from boltmesh.errors import ConfigError, DivergenceError

FLAG: Final = torch.int32
"""Of what ranks tell each other for each trained parameter, and for the loss."""


def agree_on_gradients(
    trained: Sequence[Parameter], group: ProcessGroup, device: torch.device, *, has_loss: bool
) -> list[Parameter]:
    """Return the parameters that have a gradient on any rank: zeros, where this one has none.

    Without a gradient on any rank there is none, which optimizers tell from zeros. Collective.

    Args:
        trained: Alike on all ranks.
        group: The ranks.
        device: That they communicate from.
        has_loss: Whether the batch gave one on this rank.

    Raises:
        ConfigError: For sparse gradients.
        DivergenceError: When some ranks have a loss and others have none.
    """
    flags = [int(has_loss), *(int(each.grad is not None) for each in trained)]
    counted = torch.tensor(flags, dtype=FLAG, device=device)
    dist.all_reduce(counted, group=group)
    num_losses, *counts = counted.tolist()
    size = group.size()
    if num_losses not in {0, size}:
        raise DivergenceError(
            f"training_step gave a loss on {num_losses} of {size} data ranks and None on the "
            f"others, in the last batch before an optimizer step. Return a loss on all of them: "
            f"one that is zero times an output has no influence."
        )
    used = [each for each, count in zip(trained, counts, strict=True) if count]
    for each in used:
        if each.grad is None:
            each.grad = torch.zeros_like(each)
        elif each.grad.layout != torch.strided:
            raise ConfigError(
                f"A parameter of the shape {tuple(each.shape)} has a sparse gradient, and "
                f"pipelines average dense ones. Leave sparse=True out of its embedding."
            )
    return used


def agreement_bytes(num_trained: int) -> int:
    """Return the bytes of one agreement."""
    return FLAG.itemsize * (1 + num_trained)
