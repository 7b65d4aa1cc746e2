"""Takes the shards of a unit out of memory before the next unit is made."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from boltmesh.strategies.data.axis import AxisContext
from boltmesh.strategies.data.shard_options import ShardOptions
from boltmesh.strategies.offload.layout import held_alone, held_unit
from boltmesh.strategies.offload.parking import ParkingLot
from boltmesh.strategies.tiling.weight import TiledWeight


def open_parking(options: ShardOptions, context: AxisContext) -> ParkingLot | None:
    """Where shards wait for the offload engine; None where they wait on the device."""
    if options.offload_parameters != "nvme":
        return None
    assert options.offload_path is not None
    return ParkingLot(
        options.offload_path,
        device=context.device,
        rank=dist.get_rank(),
        recorder=context.recorder,
    )


def park_unit(
    parking: ParkingLot | None,
    module: Module,
    unit: Module,
    tiled: Sequence[TiledWeight],
    context: AxisContext,
) -> None:
    """Park what a unit has just been cut into.

    Args:
        parking: Where to; None leaves everything where it is.
        module: The user's module: its parameters' names are the names in messages.
        unit: A module of ``fully_shard``.
        tiled: Weights below it that no unit gathers.
        context: Of the data axis.
    """
    if parking is None:
        return
    assert isinstance(unit, FSDPModule)
    names = {parameter: name for name, parameter in module.named_parameters()}
    alone = [
        held_alone(each.name, each.parameter, each.kept_dtype(context.compute_dtype))
        for each in tiled
    ]
    parking.park([*held_unit(unit, names), *alone])
