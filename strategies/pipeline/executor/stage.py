"""What the executor asks of a stage of the model."""

from typing import Protocol

from torch import Tensor

from boltmesh.strategies.pipeline.values import ValueSpec


class Stage(Protocol):
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
        """What crosses the border before the stage; empty for the first."""
        ...

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """What crosses the border behind the stage; empty for the last."""
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
