"""What a rank has of a tensor at one moment, for a save that goes on beside training."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from boltmesh.strategies.checkpoint.pieces import OwnChunk


class Snapshot(Tensor):
    """Stands for a whole tensor in a checkpoint's dictionary, like ``Part``, with a copy.

    It has the shape and dtype of the whole and no elements.
    """

    chunks: "list[OwnChunk]"
    """Which blocks of the whole the copy has."""
    copied: Tensor | None
    """This rank's part in host memory; None where another rank writes the tensor."""

    @staticmethod
    def of(whole: Tensor, chunks: "list[OwnChunk]", copied: Tensor | None) -> "Snapshot":
        """Return what stands for ``whole``, whose blocks ``chunks`` are in ``copied``."""
        made = torch.empty(whole.size(), dtype=whole.dtype, device="meta").as_subclass(Snapshot)
        made.requires_grad_(whole.requires_grad)
        made.chunks, made.copied = chunks, copied
        return made
