"""What telemetry shows beside what it measures of a sharded model: traffic of a step, memory."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from boltmesh.strategies.data.axis import AxisContext
from boltmesh.strategies.data.replica_memory import count_state_copies, expected_held_memory
from boltmesh.strategies.data.shard_options import ShardOptions
from boltmesh.strategies.data.shard_shape import describe_job, describe_units
from boltmesh.strategies.data.shard_traffic import expected_shard_traffic
from boltmesh.strategies.data.sharded_model import ShardedModel
from boltmesh.strategies.planner.layout import Job, Sharing
from boltmesh.strategies.planner.memory import estimate_memory
from boltmesh.strategies.planner.model import ModelShape, TensorShape, UnitShape
from boltmesh.strategies.tiling.traffic import expected_tile_traffic
from boltmesh.telemetry.snapshot import MemoryKind
from boltmesh.telemetry.traffic import ExpectedTraffic


class Expectations:
    """A sharded model and its run as the planner sees them."""

    def __init__(self, model: ShardedModel, options: ShardOptions, context: AxisContext) -> None:
        self._model, self._options, self._context = model, options, context

    @property
    def shape(self) -> ModelShape:
        """What is gathered together."""
        return describe_units(self._model.module, self._model.units, cast=self._model.cast)

    @property
    def _shape_with_tiled(self) -> ModelShape:
        """With the weights that are gathered in tiles, by no unit."""
        tiled = (
            TensorShape(
                each.name,
                tuple(each.parameter.shape),
                is_trained=each.parameter.requires_grad,
                element_bytes=each.parameter.element_size(),
                layers=tuple(
                    "lookup" if isinstance(layer, nn.Embedding) else "product"
                    for layer in each.layers
                ),
            )
            for each in self._model.tiled
        )
        units = (UnitShape(each.name, (each,)) for each in tiled)
        return replace(self.shape, units=(*self.shape.units, *units))

    @property
    def sharing(self) -> Sharing:
        """Who keeps what, and where."""
        return self._options.sharing()

    @property
    def job(self) -> Job:
        """Ranks, types and batches."""
        return describe_job(
            num_ranks=self._context.group.size(),
            shard_size=self._model.mesh.shard_size,
            num_microbatches=self._context.num_microbatches,
            compute_dtype=self._context.compute_dtype,
            is_on_host=self._context.device.type == "cpu",
        )

    def traffic(self) -> list[ExpectedTraffic]:
        """What one optimizer step moves on the data axis."""
        context = self._context
        return expected_shard_traffic(
            self.shape,
            self.sharing,
            self.job,
            num_norms=int(context.has_norm_clipping),
            more=[
                *expected_tile_traffic(
                    self._model.tiled,
                    num_batches=context.num_microbatches,
                    compute_dtype=context.compute_dtype,
                    recomputed={part for block in context.recomputed for part in block.modules()},
                ),
                *self._model.scalars.expected_traffic(num_batches=context.num_microbatches),
            ],
        )

    def memory(self, optimizers: Sequence[Optimizer]) -> list[MemoryKind]:
        """What one rank holds between two steps.

        Without offload the parameters themselves tell; with it, state is where the planner puts it.
        """
        if not self._options.has_offload:
            return expected_held_memory(self._model.module, optimizers)
        copies = count_state_copies(optimizers)
        job = replace(self.job, state_copies=copies or 0)
        kept = estimate_memory(self._shape_with_tiled, self.sharing, job).kept
        if copies is None:
            kept.pop("optimizer")
        return [
            MemoryKind(kind, place, None, num_bytes)  # type: ignore[arg-type]
            for kind, amounts in kept.items()
            for place, num_bytes in amounts.items()
            if num_bytes
        ]
