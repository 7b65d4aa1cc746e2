"""Bytes that one optimizer step sends over the data axis, by operator, and the memory in flight.

``estimate_traffic`` counts the full side of a collective, as telemetry does. On the wire, each of R
ranks sends and receives (R-1)/R of it, and twice that for an all-reduce.

``InFlightMemory`` is the memory for gathering and reducing units as ``fully_shard`` does it, in
addition to what a rank keeps. A gathered unit is allocated twice for a moment: the output of the
collective, and the parameters to which it is copied. ``Tiles`` is the same for one tiled weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from boltmesh.strategies.cost_model.model import (
    JobShape,
    ModelShape,
    ShardingLayout,
    TensorShape,
    UnitShape,
    Widths,
)
from boltmesh.strategies.cost_model.offload import FP32
from boltmesh.strategies.tiling.plan import TilePlan


@dataclass(frozen=True)
class Tiles:
    """One tiled weight on the ranks of a job."""

    weight: TensorShape
    plan: TilePlan
    widths: Widths

    @classmethod
    def of(cls, unit: UnitShape, job: JobShape) -> "Tiles":
        """Divide the weight of a unit that has ``tile_bytes``."""
        (weight,) = unit.tensors
        assert unit.tile_bytes is not None
        rows = weight.shape[0]
        row_bytes = weight.numel // rows * job.widths.store(weight.element_bytes)
        plan = TilePlan.of(rows, row_bytes, job.num_shards, unit.tile_bytes)
        return cls(weight, plan, job.widths)

    @property
    def tile_numel(self) -> int:
        """Number of elements of a gathered tile."""
        return self.plan.ranks * self.plan.tile_rows * (self.weight.numel // self.plan.rows)

    @property
    def whole_numel(self) -> int:
        """Number of elements of all tiles, with padding."""
        return self.plan.ranks * self.weight.padded_numel(self.plan.ranks)

    def forward(self) -> int:
        """Return the bytes of two gathered tiles; for a single rank those of a cast, if any."""
        width = max(map(self._width, self.weight.layers))
        if self.plan.ranks > 1:
            return 2 * self.tile_numel * width
        is_cast = width != self.widths.store(self.weight.element_bytes)
        return self.tile_numel * width if is_cast else 0

    def backward(self) -> int:
        """Return the bytes in the backward pass: those, and two gradients of a tile."""
        if not self.weight.is_trained:
            return self.forward()
        return self.forward() + 2 * self.tile_numel * FP32

    def gathers(self) -> tuple[int, int]:
        """Return collectives and bytes of a microbatch; products gather again in their backward."""
        calls = size = 0
        for layer in self.weight.layers:
            passes = 2 if layer == "product" else 1
            calls += passes * self.plan.count
            size += passes * self.whole_numel * self._width(layer)
        return calls, size

    def reductions(self) -> tuple[int, int]:
        """Return collectives and bytes of a microbatch's reductions, at least in fp32."""
        if not self.weight.is_trained:
            return 0, 0
        width = max(FP32, self.widths.store(self.weight.element_bytes))
        num_layers = len(self.weight.layers)
        return num_layers * self.plan.count, num_layers * self.whole_numel * width

    def _width(self, layer: str) -> int:
        """Return bytes per element: autocast casts for matrix products, not for lookups."""
        return self.widths.compute(self.weight.element_bytes, is_autocast=layer == "product")


class InFlightMemory:
    """Bytes in flight over the units of a model, on the device of one rank."""

    def __init__(self, units: Sequence[UnitShape], job: JobShape) -> None:
        self.units = [each for each in units if each.tensors and each.tile_bytes is None]
        self.tiles = [Tiles.of(each, job) for each in units if each.tile_bytes is not None]
        self.job = job
        self.roots = [each for each in self.units if each.stays_gathered]
        self.freed = [each for each in self.units if not each.stays_gathered]

    def gathered(self, unit: UnitShape) -> int:
        """Return the bytes of the full parameters of a unit."""
        return sum(
            self._padded(each.padded_numel(self.job.num_shards))
            * self.job.widths.compute(each.element_bytes, is_autocast=unit.is_autocast)
            for each in unit.tensors
        )

    def gradient(self, unit: UnitShape, *, accumulated: bool = False) -> int:
        """Return the bytes of a unit's full gradients; accumulated ones in the reduction dtype."""
        widths = self.job.widths
        width = widths.reduce if accumulated else widths.compute
        return sum(
            each.numel * width(each.element_bytes, is_autocast=unit.is_autocast)
            for each in unit.tensors
            if each.is_trained
        )

    def reduced(self, unit: UnitShape) -> int:
        """Return the bytes of the input of a unit's reduce-scatter."""
        return sum(
            self._padded(each.padded_numel(self.job.num_shards))
            * self.job.widths.reduce(each.element_bytes, is_autocast=unit.is_autocast)
            for each in unit.tensors
            if each.is_trained
        )

    def collective(self, unit: UnitShape) -> int:
        """Return the bytes of the output of a unit's all-gather, 0 for a single rank."""
        return self.gathered(unit) if self.job.num_shards > 1 else 0

    def all_gathered(self) -> int:
        """Return the bytes of all units, which stages 1 and 2 keep until the backward pass."""
        return sum(map(self.gathered, self.units))

    def all_gradients(self) -> int:
        """Return the bytes of all full gradients, as stage 1 accumulates them."""
        return sum(self.gradient(each, accumulated=True) for each in self.units)

    def forward(self, *, is_freed: bool) -> int:
        """Return the most bytes at one time in a forward pass."""
        largest = max((self.collective(each) for each in self.units), default=0)
        tiles = max((each.forward() for each in self.tiles), default=0)
        if not is_freed:
            return self.all_gathered() + largest
        copied_out = max((self.gathered(u) + self.collective(u) for u in self.freed), default=0)
        return self.roots_gathered() + max(copied_out, largest) + tiles

    def roots_gathered(self) -> int:
        """Return the bytes of units that stay gathered throughout."""
        return sum(map(self.gathered, self.roots))

    def _padded(self, shard_numel: int) -> int:
        return shard_numel * self.job.num_shards


NORM_BYTES = 8
"""Bytes of a gradient norm over ranks: its square is reduced as one fp64 number."""

OVERFLOW_BYTES = 4
"""Bytes of the flag of a gradient scaler, whether gradients are finite, in fp32."""


@dataclass(frozen=True)
class OperatorBytes:
    """One operator in one optimizer step of one rank."""

    operator: str
    """``all-gather``, ``reduce-scatter`` or ``all-reduce``."""
    calls: int | None
    """None if only the bytes are known."""
    whole_bytes: int
    wire_bytes: int
    """Bytes that this rank sends; it receives as many."""


def estimate_traffic(
    model: ModelShape, sharing: ShardingLayout, job: JobShape
) -> list[OperatorBytes]:
    """Return the traffic of a step; empty for a single rank."""
    if sharing.stage == 0:
        whole = sum(
            each.numel * job.widths.store(each.element_bytes)
            for unit in model.units
            for each in unit.tensors
            if each.is_trained
        )
        return _all_reduce(None, whole, job.num_ranks)
    model = model.in_tiles(sharing.tile_bytes)
    flight, batches = InFlightMemory(model.units, job), job.num_microbatches
    num_shards = job.num_shards
    gathers = reductions = gathered = reduced = 0
    averages = averaged = 0
    for unit in flight.units:
        is_trained = unit.trained_numel > 0
        rounds = 1
        if sharing.stage == 3:
            rounds = batches if unit.stays_gathered else 2 * batches
        gathers += rounds
        gathered += rounds * flight.gathered(unit)
        if is_trained:
            rounds = 1 if sharing.stage == 1 else batches
            reductions += rounds
            reduced += rounds * flight.reduced(unit)
            # Copies of the model average each shard when it is reduced.
            averages += rounds
            averaged += rounds * (flight.reduced(unit) // num_shards)
    for tiles in flight.tiles:
        calls, size = tiles.gathers()
        gathers, gathered = gathers + batches * calls, gathered + batches * size
        calls, size = tiles.reductions()
        reductions, reduced = reductions + batches * calls, reduced + batches * size
        averages += batches * calls // tiles.plan.count
        averaged += batches * size // num_shards
    moved: list[OperatorBytes] = []
    if num_shards > 1:
        share = (num_shards - 1) / num_shards
        moved.append(OperatorBytes("all-gather", gathers, gathered, round(gathered * share)))
        moved.append(OperatorBytes("reduce-scatter", reductions, reduced, round(reduced * share)))
    num_copies = job.num_ranks // num_shards
    return moved + _all_reduce(averages, averaged, num_copies)


def _all_reduce(calls: int | None, whole_bytes: int, num_ranks: int) -> list[OperatorBytes]:
    if num_ranks == 1 or not whole_bytes:
        return []
    wire = round(2 * whole_bytes * (num_ranks - 1) / num_ranks)
    return [OperatorBytes("all-reduce", calls, whole_bytes, wire)]
