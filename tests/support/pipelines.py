"""Trainers of pipelines, and of the one process that they are compared with."""

from typing import Any

from lightning.pytorch import Trainer

from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.data_parallel.pipeline_zero import PipelineZeroAxis
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.pipeline.axis import PipelineAxis
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy

MICROBATCHES = 4


def pipeline(**options: Any) -> PipelineParallelStrategy:
    """A pipeline over all ranks."""
    return PipelineParallelStrategy(
        **{"telemetry": False, "microbatches": MICROBATCHES, "timeout_s": 600.0, **options}
    )


class ShardedPipeline(MeshStrategy):
    """Pipelines whose replicas share out the optimizer state: ZeRO beside a pipeline."""

    def __init__(
        self, *, stages: int, schedule: str = "1f1b", zero_stage: int = 1, **options: Any
    ) -> None:
        asked = PipelineOptions(stages=stages, schedule=schedule, microbatches=MICROBATCHES)
        shards = PipelineZeroAxis(ZeroOptions(stage=zero_stage))
        super().__init__(
            axes=[PipelineAxis(asked, stages), shards],
            **{"telemetry": False, "timeout_s": 600.0, **options},
        )


def quiet_trainer(world_size: int, strategy: Any = "auto", **options: Any) -> Trainer:
    """A Trainer on the CPU that writes nothing and takes data in the loader's own order."""
    silence = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    defaults = {"max_epochs": 1, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    arguments = {**defaults, **silence, **options}
    return Trainer(accelerator="cpu", devices=world_size, strategy=strategy, **arguments)
