"""One way to divide a training step over a cluster."""

from dataclasses import dataclass
from typing import Literal

from boltmesh.planner.machine import Cluster

Recompute = Literal["none", "selective", "alternate", "full"]
"""Selective keeps the outputs of products and attention; alternate, as torchtitan has it, of every
second product."""
Offload = Literal["none", "optimizer", "all"]


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
        recompute: What each block computes again in the backward pass.
        has_sequence_parallel: Whether activations between divided layers are divided too.
        has_async_tensor: Whether collectives of the tensor axis run beside products.
        offload: What lives in host memory: nothing, the optimizer state, or parameters, gradients
            and optimizer state.
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
    has_sequence_parallel: bool = False
    has_async_tensor: bool = False
    offload: Offload = "none"
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
