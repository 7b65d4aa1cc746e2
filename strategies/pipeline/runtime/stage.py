"""What the executor asks of a stage of the model, and what crosses a boundary between stages."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueSpec:
    """One tensor that a boundary carries, as both of its sides know it without talking."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    """Whether its gradient travels back over the boundary."""
    origin: str
    """Where the step makes it, for messages: "output of model.layers.3", "add after encoder"."""
    cut_dim: int | None = None
    """The dim of which this rank has some positions, as ranks of a context axis; None: whole."""
    length: int = 0
    """Positions of that dim on all ranks together."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes on the wire, one way."""
        return math.prod(self.shape) * self.dtype.itemsize


class PipelineStage(Protocol):
    """One stage, which computes microbatches of the current step by their number."""

    @property
    def index(self) -> int:
        """Which stage of the model it is, counted over all ranks."""
        ...

    @property
    def is_first(self) -> bool:
        """Whether nothing comes before it, so that it receives nothing."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether the step ends in it, so that it hands nothing on."""
        ...

    def values_in(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """What crosses the boundary before the stage; empty for the first."""
        ...

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """What crosses the boundary behind the stage; empty for the last."""
        ...

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute a microbatch from what the stage before gave.

        Args:
            microbatch: Of the step, from 0.
            received: One tensor for each of ``values_in``. In training the ones that need a
                gradient are leaves that require it, and are not to be written in place.

        Returns:
            One tensor for each of ``values_out``; of the last stage what is to be differentiated:
            the weighted loss alone, or nothing where the step gave none. In a run without
            backward passes the last stage may return what it likes.
        """
        ...
