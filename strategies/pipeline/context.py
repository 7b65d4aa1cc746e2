"""What a pipeline is told of the run that it is in."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.telemetry.recording.recorder import NullRecorder, Recorder

if TYPE_CHECKING:
    from boltmesh.strategies.data.late import LateGradients

Silent = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class PipelineContext:
    """Where the axis finds itself."""

    group: ProcessGroup
    """The ranks of this pipeline."""
    new_group: Callable[..., ProcessGroup | None]
    """Makes further groups of its ranks, see ``RankMeshStrategy.new_group``."""
    data: "LateGradients"
    """What becomes of the gradients of a batch where there are several pipelines."""
    device: torch.device
    recorder: Recorder | NullRecorder
    seed: int
    """What random numbers within steps start from; alike on all ranks of the pipeline."""
    timeout: timedelta | None = None
    scaler: GradScaler | None = None
    recomputed: frozenset[Module] = frozenset()
    """Blocks whose forward pass runs once more in the backward pass."""
    num_replicas: int = 1
    """Pipelines of the job, each with batches of its own."""
    num_sharing: int = 1
    """Ranks that share each layer, each in a group like this one beside the others."""
    silent: Silent = nullcontext
    """Enters what layers are run in on tensors without data, by one rank alone."""

    @property
    def evens_shared(self) -> bool:
        """Whether stages may get averages of shared parameters that differ by a rounding.

        Sums of three and more depend on their order, and each stage has an order of its own.
        """
        return self.num_replicas > 2
