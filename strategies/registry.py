"""The names by which ``Trainer(strategy=...)`` and configs know the strategies.

Importing this module loads neither torch nor Lightning; a door is imported when its name is used.
"""

import importlib
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from boltmesh.errors import ConfigError
from boltmesh.lightning_import import loaded_packages, on_load


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
"""Default folder of strategies that offload to a disk: beside Lightning's checkpoints."""

STRATEGIES: dict[str, Entry] = {
    "bolt_ddp": Entry(
        "boltmesh.strategies.ddp",
        "DDPStrategy",
        "Data parallelism: the whole model on every rank, gradients averaged.",
    ),
    "bolt_auto": Entry(
        "boltmesh.advisor.strategy",
        "AutoStrategy",
        "Replicas, ZeRO or offload, whichever is the fastest that fits; chosen at set-up.",
    ),
    "bolt_ddp_find_unused_parameters_true": Entry(
        "boltmesh.strategies.ddp",
        "DDPStrategy",
        "Data parallelism where steps may leave parameters out.",
        {"find_unused_parameters": True},
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
    "bolt_expert": _zero(
        "Expert parallelism: the ranks of a host divide the experts; ZeRO stage 1 beside it.",
        stage=1,
        expert="node",
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
    if len(both := loaded_packages()) > 1:
        used, other = both
        warnings.warn(
            f"{used} and {other} were loaded before boltmesh, whose strategies therefore work with "
            f"the Trainer of {used} alone. Write `import boltmesh` before the first import of "
            f"either: they are one package then.",
            stacklevel=3,
        )
    on_load(_register)


def _register(package: str) -> None:
    known = importlib.import_module(f"{package}.strategies").StrategyRegistry
    for name, entry in STRATEGIES.items():
        known.register(
            name,
            partial(_build_for, package, name),
            description=entry.description,
            override=True,
        )


def _build_for(package: str, name: str, **arguments: Any) -> Any:
    """Build a strategy for the Trainer of a package.

    Raises:
        ConfigError: If both packages were loaded before boltmesh, and this is not the one it uses.
    """
    used = loaded_packages()[0]
    if package != used:
        raise ConfigError(
            f"strategy='{name}' was asked of the Trainer of {package}, but {used} was loaded "
            f"before boltmesh as well, and boltmesh works with that one alone. Write `import "
            f"boltmesh` before the first import of either: they are one package then."
        )
    return build_strategy(name, **arguments)
