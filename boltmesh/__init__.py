"""Distributed training strategies for Lightning, with a terminal dashboard for running jobs.

``import boltmesh`` makes the strategies' names known to ``Trainer(strategy="bolt_ddp")``, whether
Lightning is imported before or after it, and loads neither torch nor Lightning itself.
"""

import importlib
from typing import TYPE_CHECKING, Any

from boltmesh.strategies.registry import register_with_lightning

if TYPE_CHECKING:
    from boltmesh.errors import (
        BoltMeshError,
        CheckpointError,
        ConfigError,
        DivergenceError,
        LayoutError,
        OffloadError,
        PipelineError,
        RankError,
        TelemetryError,
    )
    from boltmesh.strategies import (
        ContextParallelStrategy,
        DDPStrategy,
        MeshStrategy,
        Parallel3DStrategy,
        PipelineParallelStrategy,
        TensorParallelStrategy,
        ZeROStrategy,
    )

__version__ = "0.1.0"

__all__ = [
    "BoltMeshError",
    "CheckpointError",
    "ConfigError",
    "ContextParallelStrategy",
    "DDPStrategy",
    "DivergenceError",
    "LayoutError",
    "MeshStrategy",
    "OffloadError",
    "Parallel3DStrategy",
    "PipelineError",
    "PipelineParallelStrategy",
    "RankError",
    "TelemetryError",
    "TensorParallelStrategy",
    "ZeROStrategy",
    "__version__",
]

_HOMES = {
    "BoltMeshError": "boltmesh.errors",
    "CheckpointError": "boltmesh.errors",
    "ConfigError": "boltmesh.errors",
    "ContextParallelStrategy": "boltmesh.strategies",
    "DDPStrategy": "boltmesh.strategies",
    "DivergenceError": "boltmesh.errors",
    "LayoutError": "boltmesh.errors",
    "MeshStrategy": "boltmesh.strategies",
    "OffloadError": "boltmesh.errors",
    "Parallel3DStrategy": "boltmesh.strategies",
    "PipelineError": "boltmesh.errors",
    "PipelineParallelStrategy": "boltmesh.strategies",
    "RankError": "boltmesh.errors",
    "TelemetryError": "boltmesh.errors",
    "TensorParallelStrategy": "boltmesh.strategies",
    "ZeROStrategy": "boltmesh.strategies",
}

register_with_lightning()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
