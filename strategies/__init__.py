"""The strategies: Lightning ``Strategy`` classes that split a model over many ranks.

One file per strategy (``ddp``, ``zero``, ``pipeline_parallel``, ``tensor_parallel``,
``context_parallel``, ``parallel_3d``) checks its arguments and chooses axes; ``registry`` lists
them by name. ``engine`` is what every strategy does for Lightning: mesh, process groups, loops,
checkpoints. It calls one object per axis: ``data_parallel`` (replicas or shards, with ``offload``
and ``tiling``), ``pipeline``, ``context``, ``tensor``.

Shared below the axes: ``dry_run``, ``cost_model``, ``checkpoint``, ``deferred_initialization``,
``topology``, and modules such as ``grad_norm``, ``blocks`` and ``activation_checkpointing``.
Private names of torch and Lightning are in ``torch_compat`` and ``lightning_compat``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boltmesh.strategies.callbacks import DetectNonFinite, StartingWeights
    from boltmesh.strategies.context_parallel import ContextParallelStrategy
    from boltmesh.strategies.ddp import DDPStrategy
    from boltmesh.strategies.deferred_initialization.deferred import deferred_init
    from boltmesh.strategies.engine import MeshStrategy
    from boltmesh.strategies.mesh import MeshLayout
    from boltmesh.strategies.parallel_3d import Parallel3DStrategy
    from boltmesh.strategies.parameter_access import gathered_parameters
    from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
    from boltmesh.strategies.tensor_parallel import TensorParallelStrategy
    from boltmesh.strategies.zero import ZeROStrategy

__all__ = [
    "ContextParallelStrategy",
    "DDPStrategy",
    "DetectNonFinite",
    "MeshLayout",
    "MeshStrategy",
    "Parallel3DStrategy",
    "PipelineParallelStrategy",
    "StartingWeights",
    "TensorParallelStrategy",
    "ZeROStrategy",
    "deferred_init",
    "gathered_parameters",
]

_HOMES = {
    "ContextParallelStrategy": "boltmesh.strategies.context_parallel",
    "DDPStrategy": "boltmesh.strategies.ddp",
    "DetectNonFinite": "boltmesh.strategies.callbacks",
    "MeshLayout": "boltmesh.strategies.mesh",
    "MeshStrategy": "boltmesh.strategies.engine",
    "Parallel3DStrategy": "boltmesh.strategies.parallel_3d",
    "PipelineParallelStrategy": "boltmesh.strategies.pipeline_parallel",
    "StartingWeights": "boltmesh.strategies.callbacks",
    "TensorParallelStrategy": "boltmesh.strategies.tensor_parallel",
    "ZeROStrategy": "boltmesh.strategies.zero",
    "deferred_init": "boltmesh.strategies.deferred_initialization.deferred",
    "gathered_parameters": "boltmesh.strategies.parameter_access",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
