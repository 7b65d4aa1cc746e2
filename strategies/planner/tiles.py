"""Weights that are gathered in tiles: what is there at one time, and what a step moves."""

from dataclasses import dataclass

from boltmesh.strategies.planner.layout import Job
from boltmesh.strategies.planner.model import UnitShape
from boltmesh.strategies.tiling.plan import TilePlan

FP32 = 4


@dataclass(frozen=True)
class Tiles:
    """One weight in tiles, on the ranks of a job."""

    unit: UnitShape
    plan: TilePlan
    job: Job

    @classmethod
    def of(cls, unit: UnitShape, job: Job) -> "Tiles":
        """Cut the weight of a unit that has ``tile_bytes``."""
        (weight,) = unit.tensors
        assert unit.tile_bytes is not None
        rows = weight.shape[0]
        row_bytes = weight.numel // rows * job.widths.store(weight.element_bytes)
        return cls(unit, TilePlan.of(rows, row_bytes, job.num_shards, unit.tile_bytes), job)

    @property
    def tile_numel(self) -> int:
        """Elements of a gathered tile."""
        (weight,) = self.unit.tensors
        return self.plan.ranks * self.plan.tile_rows * (weight.numel // weight.shape[0])

    @property
    def whole_numel(self) -> int:
        """Elements of all tiles, with their padding."""
        (weight,) = self.unit.tensors
        return self.plan.ranks * weight.padded_numel(self.plan.ranks)

    def forward(self) -> int:
        """Bytes of the two tiles that exist at a time; a rank alone has a copy where it casts."""
        width = max(map(self._width, self.unit.tensors[0].layers))
        if self.plan.ranks > 1:
            return 2 * self.tile_numel * width
        (weight,) = self.unit.tensors
        is_cast = width != self.job.widths.store(weight.element_bytes)
        return self.tile_numel * width if is_cast else 0

    def backward(self) -> int:
        """The same in the backward pass, with the gradients of a tile: made, and being reduced."""
        if not self.unit.trained_numel:
            return self.forward()
        return self.forward() + 2 * self.tile_numel * FP32

    def gathers(self) -> tuple[int, int]:
        """Collectives and bytes of a micro-batch: a product gathers again in its backward pass."""
        calls = size = 0
        for layer in self.unit.tensors[0].layers:
            passes = 2 if layer == "product" else 1
            calls += passes * self.plan.count
            size += passes * self.whole_numel * self._width(layer)
        return calls, size

    def reductions(self) -> tuple[int, int]:
        """Collectives and bytes of a micro-batch, in fp32 at least."""
        if not self.unit.trained_numel:
            return 0, 0
        (weight,) = self.unit.tensors
        width = max(FP32, self.job.widths.store(weight.element_bytes))
        num_layers = len(weight.layers)
        return num_layers * self.plan.count, num_layers * self.whole_numel * width

    def _width(self, layer: str) -> int:
        """Autocast casts for matrix products, not for lookups."""
        (weight,) = self.unit.tensors
        is_autocast = layer == "product"
        return self.job.widths.compute(weight.element_bytes, is_autocast=is_autocast)
