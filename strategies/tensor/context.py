"""What the tensor axis is told of the run that it is in."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.amp import GradScaler
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TensorContext:
    """Where the axis finds itself."""

    group: ProcessGroup
    """The ranks that share each layer with this one."""
    control: ProcessGroup
    """The same ranks on the CPU, for questions that wait for no kernel."""
    judges: ProcessGroup
    """All ranks of the job, on the CPU: their models are alike, and they agree on one plan."""
    new_group: Callable[..., ProcessGroup | None]
    """Makes further groups of its ranks, see ``RankMeshStrategy.new_group``."""
    device: torch.device
    timeout: timedelta
    scaler: GradScaler | None = None
