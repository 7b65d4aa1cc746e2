"""One way to divide a training step over a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from boltmesh.planner.machine import Cluster

Recompute = Literal["none", "selective", "alternate", "full"]
"""Selective keeps the outputs of products and attention; alternate, as torchtitan has it, of every
second product."""
Offload = Literal["none", "optimizer", "all"]
Tier = Literal["cpu", "nvme"]


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and what each rank keeps.

    Attributes:
        tensor: Ranks that divide a layer.
        pipeline: Ranks that hold stages.
        data: Replicas of the model; shards of it under ZeRO.
        context: Ranks that divide a sequence.
        expert: Ranks of the data axis that divide the experts of a mixture; 1: each has all.
        microbatch: Sequences of a microbatch.
        sequences: Sequences of a step, over all ranks.
        schedule: Name of the pipeline schedule; ``""`` without one.
        stages_per_rank: Pipeline stages of each rank.
        zero: ZeRO stage, 0 to 3.
        shard: Ranks that share one copy under ZeRO; the others replicate it (hybrid sharding).
        recompute: What a block computes again in the backward pass.
        recompute_share: Share of the blocks that do so.
        has_sequence_parallel: Whether activations between divided layers are divided too.
        has_async_tensor: Whether collectives of the tensor axis run beside products.
        offload: What leaves the device: nothing, the optimizer state, or parameters, gradients and
            optimizer state.
        tier: Where it goes: host memory, or a disk.
        offload_fraction: Share of the optimizer state that goes.
        tile_bytes: Bytes of a large weight that ZeRO-3 gathers at a time; None: whole blocks.
        dtype: Type of the matrix products: bf16, fp8 or fp4.
        has_fp32_gradients: Whether gradients are reduced in fp32.
        has_fused_kernels: Whether norms, residuals and activations are fused, as compiled.
        has_overlap: Whether gathers and reductions run beside computation.
        has_context_overlap: Whether exchanges of the context axis run beside attention; not in
            boltmesh.
        attention_speed: Rate of the kernel of fused attention, over that of FlashAttention-2.
        state_bytes: Bytes per element of parameters, gradients and optimizer state; of boltmesh
            under mixed precision.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    microbatch: int = 1
    sequences: int = 1
    schedule: str = ""
    stages_per_rank: int = 1
    zero: int = 0
    shard: int | None = None
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    has_sequence_parallel: bool = False
    has_async_tensor: bool = False
    offload: Offload = "none"
    tier: Tier = "cpu"
    offload_fraction: float = 1.0
    tile_bytes: int | None = None
    dtype: str = "bf16"
    has_fp32_gradients: bool = True
    has_fused_kernels: bool = False
    has_overlap: bool = True
    has_context_overlap: bool = False
    attention_speed: float = 1.0
    state_bytes: tuple[float, float, float] = (4.0, 4.0, 8.0)

    @property
    def num_devices(self) -> int:
        """Ranks of the job."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step on each replica."""
        return max(1, self.sequences // (self.microbatch * self.data))

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of what ZeRO shards."""
        return 1 if self.zero == 0 else self.shard or self.data * self.context

    @property
    def dimensions(self) -> dict[str, str]:
        """The divided parts in words, by ``named_dimensions``."""
        return named_dimensions(vars(self), shards=self.num_shards)


def named_dimensions(of: Mapping[str, Any], *, shards: int) -> dict[str, str]:
    """Return what a layout divides of a step, in words, by the dimension that it is of.

    Source of the dimensions: FlexFlow, Jia et al. 2019, https://arxiv.org/abs/1807.05358. Samples
    of a batch; operators on ranks of their own; attributes, the other dims of a sample;
    parameters.

    Args:
        of: Sizes of the axes ``data``, ``pipeline``, ``context``, ``tensor``, ``expert``; and
            ``schedule``, ``stages_per_rank``, ``has_sequence_parallel``, ``zero``.
        shards: Ranks that share one copy of what ZeRO shards.
    """
    size = {axis: of.get(axis) or 1 for axis in ("data", "pipeline", "context", "tensor", "expert")}
    pipeline = f"pipeline {size['pipeline']}"
    if schedule := of.get("schedule"):
        pipeline += f" by {schedule}"
    if (stages := of.get("stages_per_rank") or 1) > 1:
        pipeline += f", {stages} stages per rank"
    zero = of.get("zero", 0)
    parts = {
        "sample": [f"data {size['data']}"] if size["data"] > 1 else [],
        "operator": [
            *([pipeline] if size["pipeline"] > 1 else []),
            *([f"experts over {size['expert']} ranks"] if size["expert"] > 1 else []),
        ],
        "attribute": [
            *([f"context {size['context']}"] if size["context"] > 1 else []),
            *(
                [f"sequence parallel over {size['tensor']}"]
                if of.get("has_sequence_parallel") and size["tensor"] > 1
                else []
            ),
        ],
        "parameter": [
            *([f"tensor {size['tensor']}"] if size["tensor"] > 1 else []),
            *([f"ZeRO-{zero} over {shards}"] if zero and shards > 1 else []),
        ],
    }
    return {name: " and ".join(each) or "whole" for name, each in parts.items()}


@dataclass(frozen=True)
class AxisGroup:
    """The ranks of one axis: how many are in a node, and how many nodes they are in."""

    size: int
    in_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes that have ranks of the group."""
        return -(-self.size // self.in_node)


def groups_of(layout: Layout, cluster: Cluster) -> dict[str, AxisGroup]:
    """Return how each axis lies over the nodes: tensor innermost, then context, data, pipeline.

    ``replicas`` are data and context together, which sum gradients.
    """
    found: dict[str, AxisGroup] = {}
    inner = 1
    for name in ("tensor", "context", "data", "pipeline"):
        size: int = getattr(layout, name)
        in_node = min(size, max(1, cluster.devices_per_node // inner))
        found[name] = AxisGroup(size, in_node)
        inner *= size
    found["expert"] = AxisGroup(layout.expert, min(layout.expert, cluster.devices_per_node))
    size = layout.data * layout.context
    found["replicas"] = AxisGroup(
        size, min(size, max(1, cluster.devices_per_node // layout.tensor))
    )
    return found
