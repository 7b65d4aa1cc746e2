"""The names by which ``Trainer(strategy=...)`` and configs know the strategies.

Importing this module loads neither torch nor Lightning; a door is imported when its name is used.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

HOST = "lightning.pytorch"


@dataclass(frozen=True)
class Entry:
    """Where the class of a name is, and which arguments the name fixes."""

    module: str
    class_name: str
    description: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """Import the class."""
        return getattr(importlib.import_module(self.module), self.class_name)


def _zero(description: str, **arguments: Any) -> Entry:
    return Entry("boltmesh.strategies.zero", "ZeROStrategy", description, arguments)


OFFLOAD_FOLDER = "."
"""Where a name that offloads to a disk does so unless told: beside Lightning's checkpoints."""

STRATEGIES: dict[str, Entry] = {
    "bolt_ddp": Entry(
        "boltmesh.strategies.ddp",
        "DDPStrategy",
        "Data parallelism: the whole model on every rank, gradients averaged.",
    ),
    "bolt_replicated": Entry(
        "boltmesh.strategies.replicated",
        "ReplicatedStrategy",
        "One process with a copy of the model on several devices, to compare with.",
    ),
    "bolt_zero1": _zero("ZeRO stage 1: optimizer state is sharded.", stage=1),
    "bolt_zero2": _zero("ZeRO stage 2: optimizer state and gradients are sharded.", stage=2),
    "bolt_zero3": _zero(
        "ZeRO stage 3: optimizer state, gradients and parameters are sharded.", stage=3
    ),
    "bolt_zero1_cpu": _zero(
        "ZeRO stage 1 with the optimizer in host memory.", stage=1, offload_optimizer="cpu"
    ),
    "bolt_zero2_cpu": _zero(
        "ZeRO stage 2 with the optimizer in host memory.", stage=2, offload_optimizer="cpu"
    ),
    "bolt_zero3_cpu": _zero(
        "ZeRO stage 3 with optimizer and parameters in host memory.",
        stage=3,
        offload_optimizer="cpu",
        offload_parameters="cpu",
    ),
    "bolt_zero3_nvme": _zero(
        "ZeRO stage 3 with optimizer and parameters on a disk, by default the working directory's.",
        stage=3,
        offload_optimizer="nvme",
        offload_parameters="nvme",
        offload_path=OFFLOAD_FOLDER,
    ),
    "bolt_pipeline": Entry(
        "boltmesh.strategies.pipeline_parallel",
        "PipelineParallelStrategy",
        "Pipeline parallelism: each rank holds some layers, microbatches pass through them.",
    ),
    "bolt_tensor": Entry(
        "boltmesh.strategies.tensor_parallel",
        "TensorParallelStrategy",
        "Tensor parallelism: the ranks of a host share each layer, by a plan that finds itself.",
    ),
    "bolt_context": Entry(
        "boltmesh.strategies.context_parallel",
        "ContextParallelStrategy",
        "Context parallelism: the ranks of a group divide the sequence of each batch.",
    ),
    "bolt_3d": Entry(
        "boltmesh.strategies.parallel_3d",
        "Parallel3DStrategy",
        "3D parallelism: any ZeRO stage over replicas whose ranks share each layer.",
    ),
}


def build_strategy(name: str, **arguments: Any) -> Any:
    """The strategy of a registered name; ``arguments`` come on top of those that the name fixes."""
    entry = STRATEGIES[name]
    return entry.load()(**{**entry.arguments, **arguments})


def register_with_lightning() -> None:
    """Make the names known to Lightning: now if it is loaded, else as soon as it is.

    Lightning has no entry point for strategies, and importing it takes seconds, which a dashboard
    or ``--help`` must not pay.
    """
    if HOST in sys.modules:
        _register()
    elif not any(isinstance(finder, _WaitForHost) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WaitForHost())


def _register() -> None:
    known = importlib.import_module("lightning.pytorch.strategies").StrategyRegistry
    for name, entry in STRATEGIES.items():
        known.register(
            name, partial(build_strategy, name), description=entry.description, override=True
        )


class _WaitForHost(MetaPathFinder):
    """Stands in the import path until Lightning is imported once, then leaves."""

    @override
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != HOST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisterAfter(spec.loader)
        return spec


class _RegisterAfter(Loader):
    """Runs a module as its own loader does, and registers the names afterwards."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register()
