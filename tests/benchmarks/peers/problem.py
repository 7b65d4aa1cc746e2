"""What is trained and how, the same for every engine of a comparison."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.benchmarks.peers.network import count_parameters


@dataclass(frozen=True)
class Problem:
    """``Network``, trained with AdamW and clipping."""

    width: int
    depth: int
    place: Literal["cpu", "nvme"] | None = None
    """Where optimizer state is offloaded to."""
    folder: Path = Path()
    """For what goes to disk."""
    rows: int = 4
    """Of a batch: few, so that activations are small and a step is mostly optimizer."""
    is_bf16: bool = True
    max_norm: float = 1.0
    loss_scale: float = 1.0
    lr: float = 1e-4
    weight_decay: float = 0.01

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.width, self.depth)
