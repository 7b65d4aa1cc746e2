"""Ranks that hold some layers each, and share those with other ranks."""

from typing import Any

from typing_extensions import override

from boltmesh.strategies.data_parallel.pipeline_ddp import PipelineDdpAxis
from boltmesh.strategies.engine.pipeline_mesh import PipelineMeshStrategy
from boltmesh.strategies.engine.tensor_mesh import TensorMeshStrategy
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.tensor.options import TensorOptions


class PipelineTensor(PipelineMeshStrategy, TensorMeshStrategy):
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
        super().__init__(
            pipeline_options=PipelineOptions(
                stages=stages,
                microbatches=microbatches,
                schedule=schedule,
                stages_per_rank=stages_per_rank,
                split=split,
            ),
            tensor_options=TensorOptions(size, plan, sequence_parallel, loss_parallel),
            data_axis=PipelineDdpAxis(),
            tensor=size,
            **kwargs,
        )

    @override
    def layout_of(self, world_size: int) -> MeshLayout:
        stages = self.pipeline_axis.options.stages or world_size // self._tensor
        return MeshLayout.fill_data(world_size=world_size, pipeline=stages, tensor=self._tensor)
