"""Puts the offload engine beside a sharded model."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from boltmesh.strategies.data.axis import AxisContext
from boltmesh.strategies.data.shard_options import ShardOptions
from boltmesh.strategies.data.sharded_model import ShardedModel
from boltmesh.strategies.offload.engine import OffloadEngine
from boltmesh.strategies.offload.opening import OffloadPlan
from boltmesh.telemetry.recording.memory_walk import StoredBytes

Held = Mapping[str, Sequence[Tensor | StoredBytes]]


def open_engine(
    model: ShardedModel, options: ShardOptions, context: AxisContext
) -> OffloadEngine | None:
    """The engine that the options ask for, None where nothing leaves the device."""
    if not options.has_offload:
        return None
    engine = OffloadEngine(
        OffloadPlan(options.shares, options.offload_parameters, options.offload_path),
        device=context.device,
        rank=dist.get_rank(),
        ranks_per_node=context.ranks_per_node,
        compute_dtypes={
            each.parameter: each.kept_dtype(context.compute_dtype) for each in model.tiled
        },
        recorder=context.recorder,
        shares=context.norm_shares,
        absent=model.absent,
    )
    # The root is gathered first: it holds what the blocks leave, embeddings among it.
    names = ["", *(name for name in model.units if name)]
    engine.attach(model.module, {name: model.units[name] for name in names})
    return engine


def with_stored(held: Held, engine: OffloadEngine | None) -> Held:
    """Add what the engine holds to what tensors show."""
    if engine is None:
        return held
    total = {kind: list(tensors) for kind, tensors in held.items()}
    for kind, stored in engine.stored().items():
        total.setdefault(kind, []).extend(stored)
    return total
