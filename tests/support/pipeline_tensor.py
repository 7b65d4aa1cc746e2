"""Ranks that hold some layers each, and share those with other ranks."""

from typing import Any

from typing_extensions import override

from boltmesh.strategies.data_parallel.pipeline_ddp import PipelineDdpAxis
from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.pipeline.axis import PipelineAxis
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.tensor.axis import TensorAxis
from boltmesh.strategies.tensor.options import TensorOptions


class PipelineTensor(MeshStrategy):
    """Both axes; ranks beyond them are replicas."""

    def __init__(
        self,
        *,
        stages: int | None = None,
        size: int = 2,
        microbatches: int | None = 4,
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        split: Any = "auto",
        plan: Any = "auto",
        sequence_parallel: bool = False,
        loss_parallel: Any = "auto",
        **kwargs: Any,
    ) -> None:
        self.stages, self.tensor = stages, size
        asked = PipelineOptions(
            stages=stages,
            microbatches=microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            split=split,
        )
        self.pipeline_axis = PipelineAxis(asked)
        layers = TensorOptions(size, plan, sequence_parallel, loss_parallel)
        self.tensor_axis = TensorAxis(layers, size)
        axes = [self.pipeline_axis, PipelineDdpAxis(), self.tensor_axis]
        super().__init__(axes=axes, **kwargs)

    @override
    def choose_layout(self, world_size: int) -> MeshLayout:
        stages = self.stages or world_size // self.tensor
        return MeshLayout.fill_data(world_size=world_size, pipeline=stages, tensor=self.tensor)
