"""What crosses the border between two stages of a pipeline."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ValueSpec:
    """One tensor that a border carries, as both of its sides know it without talking."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    """Whether its gradient travels back over the border."""
    origin: str
    """Where the step makes it, for messages: "output of model.layers.3", "add after encoder"."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes on the wire, one way."""
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize
