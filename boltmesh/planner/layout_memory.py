"""Predicts the memory of the fullest rank under a layout, by kind.

Source: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, for the bytes of activations.
"""

from dataclasses import dataclass

from boltmesh.planner.layout import Layout
from boltmesh.planner.step_time import (
    HALF,
    blocks_of_rank,
    experts_of_rank,
    parameters_of_rank,
    sharded_numel,
)
from boltmesh.planner.transformer import Transformer
from boltmesh.strategies.pipeline.schedules.registry import schedule_kind

CONTEXT_BYTES = 2.5 * 2**30
"""The driver and the communication library take so much of a device."""
KEPT_BY_ALTERNATE = 0.6
"""Share of a block's activations that is kept where every second product runs again."""
FRAGMENTATION = 1.04


@dataclass(frozen=True)
class LayoutMemory:
    """Bytes of the fullest rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    other: float
    """Gathered layers, buckets, context of the device."""
    host: float = 0.0
    """In host memory, not on the device."""
    disk: float = 0.0

    @property
    def device(self) -> float:
        """Bytes on the device."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.other

    def terms(self) -> dict[str, float]:
        """Return all kinds by name."""
        return dict(vars(self))


def estimate_layout_memory(model: Transformer, layout: Layout) -> LayoutMemory:
    """Return the memory of the fullest rank."""
    numel = parameters_of_rank(model, layout)
    shards = layout.num_shards
    of_parameter, of_gradient, of_optimizer = layout.state_bytes
    parameters = of_parameter * numel / (shards if layout.zero == 3 else 1)
    if of_parameter > HALF:  # kept in fp32, and computed with in bf16
        if layout.zero == 0:
            parameters += HALF * numel
        elif layout.zero < 3:
            parameters = (HALF + of_parameter / shards) * numel
    is_accumulated = layout.num_microbatches > 1 or layout.pipeline > 1
    has_whole = layout.zero == 0 or (layout.zero == 1 and is_accumulated)
    gradients = of_gradient * numel / (1 if has_whole else shards)
    optimizer = of_optimizer * numel / (shards if layout.zero >= 1 else 1)
    gathered = 0.0
    tables = (1 if model.is_tied else 2) * model.vocab * model.hidden
    if layout.zero == 3:  # two blocks in bf16; the tables and their gradients in fp32
        gathered = (2 * HALF * sharded_numel(model, layout) + 8.0 * tables) / layout.tensor
        if layout.tile_bytes is not None:  # two tiles in bf16, and their gradients in fp32
            gathered = min(gathered, 3.0 * layout.tile_bytes)
    experts = experts_of_rank(model, layout)  # whole, in every stage
    parameters += (of_parameter + (HALF if of_parameter > HALF else 0)) * experts
    gradients += of_gradient * experts
    optimizer += of_optimizer * experts
    activations, logits = _activations(model, layout)
    outside = {"cpu": 0.0, "nvme": 0.0}
    if layout.offload != "none":  # fp32 values and moments, and gradients in host memory
        share = layout.offload_fraction
        parameters = HALF * numel * ((layout.zero < 3) + 1 / shards)  # the device keeps bf16
        state = (of_parameter + of_optimizer) * numel / shards
        outside[layout.tier] += share * state
        outside["cpu"] += share * of_gradient * numel / shards
        gradients = gradients if has_whole else (1 - share) * gradients
        optimizer = (1 - share) * state
        if layout.tile_bytes is None:  # the tables' gradients on their way, in fp32
            gathered += (4.0 if layout.zero == 3 else 8.0) * tables / layout.tensor
    if layout.offload == "all":
        outside[layout.tier] += HALF * numel / shards
        parameters = 0.0
    return LayoutMemory(
        parameters,
        gradients,
        optimizer,
        activations * FRAGMENTATION,
        logits,
        CONTEXT_BYTES + gathered,
        host=outside["cpu"],
        disk=outside["nvme"],
    )


def _activations(model: Transformer, layout: Layout) -> tuple[float, float]:
    """Return the bytes of blocks, and of the logits, that a rank keeps at once."""
    tokens = layout.microbatch * model.seq / layout.context
    ranks, width = layout.tensor, model.hidden
    active = max(1, model.active)
    ffn = (3 if model.is_gated else 2) * model.ffn / width * active
    # Per token and unit of width: 34 for 4 times the width; the feed-forward layer is 19 of them,
    # queries, keys, values and their result are 8.
    divided = 8.0 * model.query_width / width + 2.0 * ffn
    repeated = 8.0 if model.has_flash else 10.0  # two masks of dropout
    repeated += 4.0 * model.active  # rows of experts, and their results
    kept = (
        tokens
        * width
        * (
            (repeated + divided) / ranks
            if layout.has_sequence_parallel
            else repeated + divided / ranks
        )
    )
    scores = 0.0 if model.has_flash else 5.0 * model.heads * model.seq * tokens / ranks
    blocks, _ = blocks_of_rank(model.layers, layout)
    inputs = 2.0 * tokens * width / (ranks if layout.has_sequence_parallel else 1)
    if layout.recompute == "full":
        again = layout.recompute_share
        once = (again * inputs + (1 - again) * (kept + scores)) * blocks
        live = kept + scores
    elif layout.recompute in {"selective", "alternate"}:
        share = KEPT_BY_ALTERNATE if layout.recompute == "alternate" else 1.0
        once, live = share * kept * blocks, scores
    else:
        once, live = (kept + scores) * blocks, 0.0
    logits = 6.0 * tokens * model.vocab / ranks
    return once * live_microbatches(layout) + live, logits


def live_microbatches(layout: Layout) -> float:
    """Return how many microbatches the first stage keeps at once."""
    pipeline, count = layout.pipeline, layout.num_microbatches
    if pipeline == 1:
        return 1.0
    kind = schedule_kind(layout.schedule or "1f1b")
    return kind.live_microbatches(pipeline, count, layout.stages_per_rank)
