"""One way to divide a training step over a cluster."""

from dataclasses import dataclass
from typing import Any, Literal

from boltmesh.axes import AXES
from boltmesh.planner.machine import Cluster
from boltmesh.strategies.registry import STRATEGIES

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
        recompute: Part of a block that is recomputed in the backward pass.
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
        balance: How positions are dealt over the context axis; None: as they come.
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
    balance: str | None = "zigzag"
    attention_speed: float = 1.0
    state_bytes: tuple[float, float, float] = (4.0, 4.0, 8.0)

    def changed(self, **changes: Any) -> "Layout":
        """Return a copy with these fields; ``dataclasses.replace`` takes ten times as long."""
        made = object.__new__(Layout)
        vars(made).update(vars(self), **changes)
        return made

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
    def is_divided(self) -> bool:
        """Whether a replica is more than one rank."""
        return self.tensor * self.pipeline * self.context > 1

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Ranks of the tensor, pipeline, context, expert and data axis."""
        return self.tensor, self.pipeline, self.context, self.expert, self.data

    @property
    def division(self) -> tuple[object, ...]:
        """A key that two layouts share if they differ in tuning alone: axes and stage first."""
        return (
            *self.axis_sizes,
            1 if self.zero == 2 else self.zero,
            self.offload,
            self.tier,
            self.shard,
        )

    @property
    def num_mechanisms(self) -> float:
        """Parts of a layout beside replicas; of two equal ones the simpler comes first."""
        axes = self.tensor, self.pipeline, self.context, self.expert
        more = self.tile_bytes, self.shard
        return (
            sum(size > 1 for size in axes)
            + sum(each is not None for each in more)
            + 2 * (self.offload != "none")
            + (self.tier == "nvme")
            + (self.recompute != "none")
            + self.has_sequence_parallel / 2
            + (self.schedule not in {"", "1f1b"})
            + self.zero / 4
        )

    @property
    def strategy(self) -> tuple[str, dict[str, Any]]:
        """Registered name of the strategy that makes it, and the arguments beside the name's."""
        found: dict[str, Any] = {}
        if self.is_divided:
            name = "bolt_3d"
            found = {"pipeline": self.pipeline, "data": self.data, "tensor": self.tensor}
            found |= {} if self.context == 1 else {"context": self.context}
            found["zero_stage"] = self.zero
        elif self.expert > 1:
            name, found = "bolt_expert", {"stage": self.zero}
        else:
            name = f"bolt_zero{self.zero}" if self.zero else "bolt_ddp"
        found |= {} if self.expert == 1 else {"expert": self.expert}
        named = {"optimizer": (1, 2), "all": (3,)}.get(self.offload, ())
        if (
            name.startswith("bolt_zero")
            and self.zero in named
            and f"{name}_{self.tier}" in STRATEGIES
        ):
            name += f"_{self.tier}"
        elif self.offload != "none":
            found["offload_optimizer"] = self.tier
            found |= {"offload_parameters": self.tier} if self.offload == "all" else {}
            found |= {"offload_path": "."} if self.tier == "nvme" else {}
        given = {
            "offload_fraction": None if self.offload_fraction == 1 else self.offload_fraction,
            "shard_size": self.shard,
            "tile_linear_bytes": self.tile_bytes,
            "schedule": self.schedule or None,
            "sequence_parallel": self.has_sequence_parallel or None,
            "balance": self.balance if self.context > 1 else None,
            "activation_checkpointing": self.recomputation,
        }
        return name, found | {key: value for key, value in given.items() if value is not None}

    @property
    def recomputation(self) -> str | dict[str, float] | None:
        """``activation_checkpointing`` of the strategy."""
        if self.recompute == "none":
            return None
        is_part = self.recompute_share < 1
        return {self.recompute: self.recompute_share} if is_part else self.recompute

    @property
    def dimensions(self) -> dict[str, str]:
        """The divided parts of a step in words, by their dimension.

        Source of the dimensions: FlexFlow, Jia et al. 2019, https://arxiv.org/abs/1807.05358.
        Samples of a batch; operators on ranks of their own; attributes, the other dims of a sample;
        parameters.
        """
        pipeline = f"pipeline {self.pipeline} by {self.schedule or '1f1b'}"
        if self.stages_per_rank > 1:
            pipeline += f", {self.stages_per_rank} stages per rank"
        has_sequence = self.has_sequence_parallel and self.tensor > 1
        parts = {
            "sample": {f"data {self.data}": self.data > 1},
            "operator": {
                pipeline: self.pipeline > 1,
                f"experts over {self.expert} ranks": self.expert > 1,
            },
            "attribute": {
                f"context {self.context}": self.context > 1,
                f"sequence parallel over {self.tensor}": has_sequence,
            },
            "parameter": {
                f"tensor {self.tensor}": self.tensor > 1,
                f"ZeRO-{self.zero} over {self.num_shards}": self.num_shards > 1,
            },
        }
        return {
            name: " and ".join(text for text, is_so in each.items() if is_so) or "whole"
            for name, each in parts.items()
        }


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
    """Return how each axis lies over the nodes, the innermost first.

    ``replicas`` are data and context together, which sum gradients.
    """
    found: dict[str, AxisGroup] = {}
    inner = 1
    for name in reversed(AXES):
        size: int = getattr(layout, name, 1)
        in_node = min(size, max(1, cluster.devices_per_node // inner))
        found[name] = AxisGroup(size, in_node)
        inner *= size
    found["expert"] = AxisGroup(layout.expert, min(layout.expert, cluster.devices_per_node))
    size = layout.data * layout.context
    found["replicas"] = AxisGroup(
        size, min(size, max(1, cluster.devices_per_node // layout.tensor))
    )
    return found
