"""``PipelineStage``, the runtime's interface of a stage; ``ValueSpec``, a value between stages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueSpec:
    """A tensor sent over a boundary, as both sides know it without communication."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    """Whether its gradient is sent back over the boundary."""
    origin: str
    """Operation that makes it, for messages: "output of model.layers.3", "add after encoder"."""
    seq_dim: int | None = None
    """Dim along which this rank has some positions, on a context axis; None: whole."""
    length: int = 0
    """Positions along that dim on all ranks together."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a message in one direction."""
        return math.prod(self.shape) * self.dtype.itemsize


Chunk = tuple[int, int]
"""A stage and a microbatch."""

Specs = Mapping[Chunk, tuple[ValueSpec, ...]]
"""The values that a stage sends, or that it expects, by stage and microbatch."""


class PipelineStage(Protocol):
    """A stage, which computes microbatches of the current step by number."""

    @property
    def index(self) -> int:
        """Number of the stage, counted over all ranks."""
        ...

    @property
    def is_first(self) -> bool:
        """Whether it is the first stage, which receives nothing."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether it is the last stage, which sends nothing on."""
        ...

    def values_in(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """Return the values sent over the boundary before the stage; empty for the first."""
        ...

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """Return the values sent over the boundary behind the stage; empty for the last."""
        ...

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute a microbatch from the outputs of the stage before.

        Args:
            microbatch: Number in the step, from 0.
            received: One tensor of the shape and dtype of each of ``values_in``. In training those
                that need a gradient are leaves that require it, and must not be written in place.

        Returns:
            One tensor of the shape and dtype of each of ``values_out``. The last stage returns the
            losses to differentiate: the weighted loss of shape ``()``, or nothing if the step gave
            none. In a run without backward passes it may return any tensors.
        """
        ...
