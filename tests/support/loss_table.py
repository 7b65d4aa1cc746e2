"""Losses behind a model's last layer, and a trial of them without any model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from boltmesh.strategies.pipeline.loss.log_rules import note
from boltmesh.strategies.pipeline.loss.trial import TrialOutcome
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec

ROWS, TOKENS, CLASSES = 11, 6, 10


@dataclass
class Batch:
    """What a step has beside the values of its layers."""

    labels: Tensor
    """(B, T); -100 does not count."""
    targets: Tensor
    """(B, T, C)."""

    @property
    def mask(self) -> Tensor:
        """(B, T); 1 where a token counts."""
        return (self.labels != -100).float()

    @property
    def known(self) -> Tensor:
        """(B, T); labels without gaps."""
        return self.labels.clamp(min=0)

    def part(self, start: int, count: int) -> "Batch":
        """Some rows."""
        end = start + count
        return Batch(self.labels[start:end], self.targets[start:end])


def batch(rows: int = ROWS, *, seed: int = 0) -> Batch:
    """Labels with very uneven gaps: rows 5 and 6 have none at all."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (rows, TOKENS), generator=generator)
    labels[0, :5] = -100
    labels[1, :2] = -100
    labels[5:7] = -100
    return Batch(labels, torch.rand(rows, TOKENS, CLASSES, generator=generator))


Loss = Callable[[Tensor, Batch], Any]


@dataclass
class FunctionTrial:
    """A loss as a function of logits (B, T, C), instead of the end of a LightningModule's step."""

    loss: Loss
    batch: Batch
    log: Callable[[Tensor, Batch], Mapping[str, Any]] = field(default=lambda _, __: {})
    scalars: int = 0
    """How many 0-dim values of layers come after the logits."""

    @property
    def num_rows(self) -> int:
        return len(self.batch.labels)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def rows(self, numbers: Sequence[int]) -> Batch:
        return Batch(self.batch.labels[list(numbers)], self.batch.targets[list(numbers)])

    def values_in(self, part: Batch) -> tuple[tuple[ValueSpec, bool], ...]:
        shape = (len(part.labels), TOKENS, CLASSES)
        logits = ValueSpec(shape, torch.float32, True, "head")
        scalar = ValueSpec((), torch.float32, True, "router")
        return ((logits, True), *[(scalar, True)] * self.scalars)

    def run(
        self, part: Batch, values: Sequence[Tensor], during: AbstractContextManager[None]
    ) -> TrialOutcome:
        with during:
            given: Any = values[0] if not self.scalars else values
            loss = self.loss(given, part)
            logged = self.log(values[0], part)
        return TrialOutcome(
            loss, {(name, None): note(0, value, {}) for name, value in logged.items()}
        )

    def largest(self, number: float) -> float:
        return number


WEIGHT = Parameter(torch.linspace(-1.0, 1.0, 7))
SCALE = Parameter(torch.tensor(0.7))
"""Parameters that a step uses itself."""
