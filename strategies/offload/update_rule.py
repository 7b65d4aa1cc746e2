"""What a step does to a chunk, whichever optimizer asked for it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from boltmesh.strategies.offload.buckets import Piece, Slot


@dataclass(frozen=True)
class PieceGradient:
    """A stretch of one parameter and its gradient there, on the device of the state."""

    piece: Piece
    gradient: Tensor


@dataclass(frozen=True)
class Update:
    """What one parameter's next step is to be."""

    settings: Any
    """Hyper-parameters; equal ones compare equal."""
    step: int
    """1 at the first."""


@dataclass(frozen=True)
class ChunkStep:
    """All that a step of one chunk works on."""

    state: tuple[Tensor, ...]
    """The chunk's tensors: values of parameters, then what ``UpdateRule.state_names`` names."""
    offset: int
    """Where in its bucket the chunk begins."""
    pieces: Sequence[PieceGradient]
    """What to step; what has no gradient is left out and stays as it is."""
    updates: Mapping[Slot, Update]
    """By parameter."""


class UpdateRule(ABC):
    """An optimizer's arithmetic on a chunk's flat tensors."""

    state_names: tuple[str, ...] = ()
    """The keys in ``optimizer.state[p]`` of a chunk's tensors after the first."""

    @abstractmethod
    def settings(self, group: Mapping[str, Any]) -> Any:
        """The hyper-parameters of a group as they are now."""

    def is_reversible(self, settings: Any) -> bool:
        """Whether ``correct`` and ``undo`` work for these settings."""
        return False

    @abstractmethod
    def apply(self, chunk: ChunkStep, coefficient: float) -> None:
        """Step with ``coefficient`` times the gradients, which may be overwritten."""

    def correct(self, chunk: ChunkStep, coefficient: float) -> None:
        """Make of a step that was taken one with ``coefficient`` times the gradients."""
        raise NotImplementedError

    def undo(self, chunk: ChunkStep) -> None:
        """Take a step back."""
        raise NotImplementedError

    def scalars(self, slot: Slot) -> dict[str, Any]:
        """What ``optimizer.state[p]`` holds beside flat tensors and ``step``."""
        return {}

    def load_scalars(  # noqa: B027 - Adam has none
        self, slot: Slot, scalars: Mapping[str, Any], starts: Sequence[int]
    ) -> None:
        """Take such values over, from a checkpoint, for the pieces that begin at ``starts``."""
