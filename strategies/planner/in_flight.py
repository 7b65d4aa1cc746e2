"""What gathering and reducing units takes beside what a rank keeps, as ``fully_shard`` does it.

A gathered unit is allocated twice for a moment: the collective's output, and the parameters that
it is copied out to.
"""

from collections.abc import Sequence

from boltmesh.strategies.planner.layout import Job
from boltmesh.strategies.planner.model import UnitShape
from boltmesh.strategies.planner.tiles import Tiles


class Flight:
    """Bytes in flight over the units of a model, on the device of one rank."""

    def __init__(self, units: Sequence[UnitShape], job: Job) -> None:
        self.units = [each for each in units if each.tensors and each.tile_bytes is None]
        self.tiles = [Tiles.of(each, job) for each in units if each.tile_bytes is not None]
        self.job = job
        self.roots = [each for each in self.units if each.stays_gathered]
        self.freed = [each for each in self.units if not each.stays_gathered]

    def gathered(self, unit: UnitShape) -> int:
        """The whole parameters of a unit."""
        return sum(
            self._padded(each.padded_numel(self.job.num_shards))
            * self.job.widths.compute(each.element_bytes, is_autocast=unit.is_autocast)
            for each in unit.tensors
        )

    def gradient(self, unit: UnitShape, *, accumulated: bool = False) -> int:
        """The whole gradients of a unit; accumulated without reducing, in the reduction's type."""
        widths = self.job.widths
        width = widths.reduce if accumulated else widths.compute
        return sum(
            each.numel * width(each.element_bytes, is_autocast=unit.is_autocast)
            for each in unit.tensors
            if each.is_trained
        )

    def reduced(self, unit: UnitShape) -> int:
        """The input of a unit's reduce-scatter."""
        return sum(
            self._padded(each.padded_numel(self.job.num_shards))
            * self.job.widths.reduce(each.element_bytes, is_autocast=unit.is_autocast)
            for each in unit.tensors
            if each.is_trained
        )

    def collective(self, unit: UnitShape) -> int:
        """The output of a unit's all-gather; a rank alone gathers nothing."""
        return self.gathered(unit) if self.job.num_shards > 1 else 0

    def all_gathered(self) -> int:
        """Every unit at once, as stages 1 and 2 have it between forward and backward pass."""
        return sum(map(self.gathered, self.units))

    def all_gradients(self) -> int:
        """All gradients whole, as stage 1 accumulates them."""
        return sum(self.gradient(each, accumulated=True) for each in self.units)

    def forward(self, *, is_freed: bool) -> int:
        """The most at one time in a forward pass."""
        largest = max((self.collective(each) for each in self.units), default=0)
        tiles = max((each.forward() for each in self.tiles), default=0)
        if not is_freed:
            return self.all_gathered() + largest
        copied_out = max((self.gathered(u) + self.collective(u) for u in self.freed), default=0)
        return self.roots_gathered() + max(copied_out, largest) + tiles

    def roots_gathered(self) -> int:
        """What stays gathered throughout."""
        return sum(map(self.gathered, self.roots))

    def _padded(self, shard_numel: int) -> int:
        return shard_numel * self.job.num_shards
