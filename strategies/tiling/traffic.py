"""What layers that run in tiles move in an optimizer step, as telemetry counts it."""

from collections.abc import Container, Iterable

import torch
from torch import nn

from boltmesh.strategies.tiling.weight import TiledWeight
from boltmesh.telemetry.traffic import ExpectedTraffic


def expected_tile_traffic(
    tiled: Iterable[TiledWeight],
    *,
    num_batches: int,
    compute_dtype: torch.dtype | None,
    recomputed: Container[nn.Module] = (),
) -> list[ExpectedTraffic]:
    """Return the traffic of one step, one entry per operator.

    Args:
        tiled: Their weights.
        num_batches: Batches of an optimizer step.
        compute_dtype: What autocast computes in; None without.
        recomputed: Layers whose forward pass runs once more in the backward pass.
    """
    calls = dict.fromkeys(("gather", "reduce", "average"), 0)
    moved = dict(calls)
    for weight in tiled:
        padded = weight.plan.ranks * weight.shard_numel
        for layer in weight.layers:
            # What an Embedding's gradient needs of its weight is the shape.
            passes = (2 if isinstance(layer, nn.Linear) else 1) + (layer in recomputed)
            calls["gather"] += passes * weight.plan.count
            moved["gather"] += (
                passes * padded * weight.gathered_dtype(layer, compute_dtype).itemsize
            )
            if weight.parameter.requires_grad:
                calls["reduce"] += weight.plan.count
                moved["reduce"] += padded * weight.reduced_dtype.itemsize
                calls["average"] += 1
                moved["average"] += weight.shard_numel * weight.reduced_dtype.itemsize
    has_shards = any(weight.plan.ranks > 1 for weight in tiled)
    has_copies = any(weight.num_copies > 1 for weight in tiled)
    kinds = [
        ("gather", "_allgather_base", has_shards, "tiles of large layers, in every pass"),
        ("reduce", "_reduce_scatter_base", has_shards, "gradients of tiles, once per batch"),
        ("average", "allreduce", has_copies, "their averages over the copies of the model"),
    ]
    return [
        ExpectedTraffic("data", operator, num_batches * moved[kind], num_batches * calls[kind], why)
        for kind, operator, is_there, why in kinds
        if is_there and moved[kind]
    ]
