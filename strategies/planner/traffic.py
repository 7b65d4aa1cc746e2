"""What one optimizer step moves between the ranks of the data axis, by operator.

Bytes are of the whole side of a collective, as telemetry counts them; on the wire each of W ranks
sends and receives (W-1)/W of them, and twice that for an all-reduce.
"""

from dataclasses import dataclass

from boltmesh.strategies.planner.in_flight import Flight
from boltmesh.strategies.planner.layout import Job, Sharing
from boltmesh.strategies.planner.model import ModelShape

NORM_BYTES = 8
"""Of a norm of gradients over several ranks: its square travels as one number in fp64."""

OVERFLOW_BYTES = 4
"""Of what a gradient scaler keeps: whether gradients are finite, in single precision."""


@dataclass(frozen=True)
class Moved:
    """One operator in one optimizer step of one rank."""

    operator: str
    """``all-gather``, ``reduce-scatter`` or ``all-reduce``."""
    calls: int | None
    """None where only the bytes are known."""
    whole_bytes: int
    wire_bytes: int
    """What this rank sends, and as much again that it receives."""


def estimate_traffic(model: ModelShape, sharing: Sharing, job: Job) -> list[Moved]:
    """Return what a step moves; nothing for a rank that is alone."""
    if sharing.stage == 0:
        whole = sum(
            each.numel * job.widths.store(each.element_bytes)
            for unit in model.units
            for each in unit.tensors
            if each.is_trained
        )
        return _all_reduce(None, whole, job.num_ranks)
    model = model.in_tiles(sharing.tile_bytes)
    flight, batches = Flight(model.units, job), job.num_microbatches
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
            # Copies of the model average each shard as it is reduced.
            averages += rounds
            averaged += rounds * (flight.reduced(unit) // num_shards)
    for tiles in flight.tiles:
        calls, size = tiles.gathers()
        gathers, gathered = gathers + batches * calls, gathered + batches * size
        calls, size = tiles.reductions()
        reductions, reduced = reductions + batches * calls, reduced + batches * size
        averages += batches * calls // tiles.plan.count
        averaged += batches * size // num_shards
    moved: list[Moved] = []
    if num_shards > 1:
        share = (num_shards - 1) / num_shards
        moved.append(Moved("all-gather", gathers, gathered, round(gathered * share)))
        moved.append(Moved("reduce-scatter", reductions, reduced, round(reduced * share)))
    num_copies = job.num_ranks // num_shards
    return moved + _all_reduce(averages, averaged, num_copies)


def _all_reduce(calls: int | None, whole_bytes: int, num_ranks: int) -> list[Moved]:
    if num_ranks == 1 or not whole_bytes:
        return []
    wire = round(2 * whole_bytes * (num_ranks - 1) / num_ranks)
    return [Moved("all-reduce", calls, whole_bytes, wire)]
