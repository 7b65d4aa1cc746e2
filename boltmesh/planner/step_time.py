"""Predicts how long one step takes under a layout, term by term.

Sources: Narayanan et al. 2021 (arXiv 2104.04473), Korthikanti et al. 2022 (2205.05198), Rajbhandari
et al. 2020 (1910.02054) for the volumes.

Shapes: T tokens of a microbatch on a rank, H width, S sequence length, t ranks of the tensor axis.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import ceil, comb, log2

from boltmesh.planner.layout import AxisGroup, Layout, groups_of
from boltmesh.planner.links import ClusterLinks
from boltmesh.planner.machine import DISK_RATE, Accelerator, Cluster
from boltmesh.planner.rates import Rates
from boltmesh.planner.transformer import Transformer
from boltmesh.strategies.pipeline.schedules.registry import schedule_kind

HALF = 2
"""Bytes of an activation, a parameter or a gradient in bf16."""
OPTIMIZER_BYTES = 34
"""Read and written by Adam for each parameter that a rank updates: fp32 value, two moments and
gradient, bf16 value."""
STATE_BYTES = 12
"""State of Adam for each parameter in fp32, value and two moments: a disk reads and writes it."""
HOST_OPTIMIZER_RATE = 100e9 / 28
"""Parameters that Adam on a host updates in a second, of the memory rate of a host per device."""
TILES = ((256, 128, 1.0), (128, 128, 0.92), (64, 128, 0.75), (64, 64, 0.6))
"""Rows and columns of a tile that one unit of an accelerator computes, and the share of the rate
that it reaches: a smaller tile loads more bytes for each operation."""
SCORE_BYTES = 12
"""Traffic of unfused attention for each score: written, read and written by the softmax and by the
dropout, read by the product with the values."""
BLOCK_SECONDS = 10e-6
"""Part of a block's pass that is no computation, where launches run ahead."""
OVERLAP = 0.874
"""Share of communication beside computation that is hidden: computation is 1.126 times slower
meanwhile, planner_micro.csv M08."""
CAST_BYTES = 5
"""To scale an element to fp8: read for the largest one, read again, written in one byte."""
TILE_SECONDS = 1e-6
"""To start a tile; each is written before the next begins."""
ATTENTION_HALF_SEQUENCE = 386
"""Length at which fused attention reaches half of its rate: planner_micro.csv M36 and M37."""
NOT_DIVIDED = 0.45
"""Share of elementwise traffic that tensor parallelism without sequence parallelism repeats."""
HIDDEN_BY_ASYNC = 0.7
"""Share of the tensor axis's collectives that run beside products, where they are cut in parts."""


TERMS = {
    "compute": "forward and backward passes",
    "recompute": "recomputation",
    "tensor": "collectives of the tensor axis",
    "context": "collectives of the context axis",
    "expert": "exchanges of the expert axis",
    "gather": "ZeRO-3 gathers and host transfers not hidden",
    "bubble": "pipeline bubble",
    "data": "reduction of gradients not hidden",
    "optimizer": "optimizer step",
    "fixed": "fixed",
}


@dataclass(frozen=True)
class PredictedStepTime:
    """Seconds of one step, in exclusive parts."""

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    gather: float
    """Gathers of ZeRO-3, and transfers from and to the host, that computation does not hide."""
    bubble: float
    """A rank waits for other stages, messages between them included."""
    data: float
    """The reduction of gradients that computation does not hide."""
    optimizer: float
    fixed: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.terms().values())

    def terms(self) -> dict[str, float]:
        """Return all parts by name."""
        return dict(vars(self))

    def scaled(self, factor: float) -> "PredictedStepTime":
        """Return the same with every part multiplied."""
        return replace(self, **{name: factor * value for name, value in self.terms().items()})


@dataclass(frozen=True)
class Passes:
    """Seconds of forward and backward passes on a part of the model, collectives apart."""

    forward: float
    backward: float
    recompute: float
    tensor: float
    context: float
    expert: float

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def times(self, count: float) -> "Passes":
        """Return the passes, each multiplied by ``count``."""
        return Passes(*(count * each for each in vars(self).values()))

    @property
    def seconds(self) -> float:
        """All of it."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class RankSeconds:
    """The work of a layout's busiest rank in a step, in seconds, before anything is hidden.

    It comes from the sizes of a transformer, or from the counts of a module's own step; what
    follows from it is the same.
    """

    passes: Passes
    """Passes of all microbatches together."""
    gather: float
    """Gathers and reductions of ZeRO-3, in each pass."""
    transfer: float
    """Parameters and gradients between device, host and disk, in each pass."""
    reduction: float
    """Gradients of a step, and parameters that are gathered once."""
    bubble: float
    optimizer: float
    fixed: float
    microbatches: int
    """The backward pass of the last one may hide the reduction."""

    def predicted(self, *, overlap: float, factor: float) -> "PredictedStepTime":
        """Return the time of a step.

        Args:
            overlap: Share of what may be hidden behind computation that is.
            factor: On everything.
        """
        passes = self.passes
        computing = passes.forward + passes.backward + passes.recompute
        gather = self.gather - min(self.gather, computing) * overlap
        gather += max(0.0, self.transfer - computing)
        behind = passes.backward / self.microbatches
        return PredictedStepTime(
            compute=passes.forward + passes.backward,
            recompute=passes.recompute,
            tensor=passes.tensor,
            context=passes.context,
            expert=passes.expert,
            gather=gather,
            bubble=self.bubble,
            data=self.reduction - min(self.reduction, behind) * overlap,
            optimizer=self.optimizer,
            fixed=self.fixed,
        ).scaled(factor)


class StepTimeModel:
    """Predicts the step of one model on one cluster.

    Args:
        model: The sizes of the model.
        cluster: Where it trains.
        rates: Shares of the hardware's peaks that software reaches.
    """

    def __init__(self, model: Transformer, cluster: Cluster, rates: Rates) -> None:
        self.model = model
        self.cluster = cluster
        self.rates = rates
        self.links = ClusterLinks(cluster, rates)

    def predict(self, layout: Layout) -> PredictedStepTime:
        """Return the time of one step."""
        rates = self.rates
        groups = groups_of(layout, self.cluster)
        slowest = self._slowest(layout, groups)
        message = self._message(layout, groups["pipeline"])
        bubble = self._bubble(layout, slowest.seconds, message)
        parameters = parameters_of_rank(self.model, layout)
        gather = self._gather(layout, groups["replicas"]) if layout.zero == 3 else 0.0
        step = RankSeconds(
            slowest.times(layout.num_microbatches),
            gather=gather,
            transfer=self._transfer(layout, parameters),
            reduction=self._reduction(layout, groups["replicas"], parameters),
            bubble=bubble,
            optimizer=self._optimizer(layout, parameters),
            fixed=rates.step_ms * 1e-3,
            microbatches=layout.num_microbatches,
        )
        return step.predicted(
            overlap=OVERLAP if layout.has_overlap else 0.0, factor=factor_of(self.cluster, rates)
        )

    def stage_times(self, layout: Layout) -> tuple[tuple[float, float], float]:
        """Return the seconds of a stage's forward and backward pass, and of a message."""
        groups = groups_of(layout, self.cluster)
        slowest = self._slowest(layout, groups)
        forward = slowest.forward + (slowest.tensor + slowest.context + slowest.expert) / 3
        per_stage = 1 / layout.stages_per_rank
        stage = forward * per_stage, (slowest.seconds - forward) * per_stage
        return stage, self._message(layout, groups["pipeline"])

    # Parts of the model.

    def _slowest(self, layout: Layout, groups: dict[str, AxisGroup]) -> Passes:
        """Return a microbatch on the rank with the most work."""
        blocks, last = blocks_of_rank(self.model.layers, layout)
        block = self._block(layout, groups)
        with_logits = block.times(last) + self._logits(layout, groups)
        return max(block.times(blocks), with_logits, key=lambda each: each.seconds)

    def _tokens(self, layout: Layout) -> float:
        return layout.microbatch * self.model.seq / layout.context

    def _block(self, layout: Layout, groups: dict[str, AxisGroup]) -> Passes:
        model, rates, device = self.model, self.rates, self.cluster.accelerator
        tokens, width, ranks = self._tokens(layout), model.hidden, layout.tensor
        up = (2 if model.is_gated else 1) * model.ffn
        here = max(1, model.experts // layout.expert)  # each computes its part of the rows
        rows = tokens * max(1, model.active) / here
        whole = ranks if layout.expert > 1 else 1  # ranks of a tensor group deal the rows then
        shapes = (
            (1, tokens, width, (model.query_width + 2 * model.kv_width) / ranks),
            (1, tokens, model.query_width / ranks, width),
            (here, rows / whole, width, up * whole / ranks),
            (here, rows / whole, model.ffn * whole / ranks, width),
        )
        passes = [
            tuple(count * each for each in self._product(layout.dtype, *shape))
            for count, *shape in shapes
        ]
        products = sum(forward for forward, _ in passes)
        attention = self._attention(layout, tokens)
        share = (
            1 / ranks
            if layout.has_sequence_parallel or ranks == 1
            else (NOT_DIVIDED + (1 - NOT_DIVIDED) / ranks)
        )
        num_bytes = elementwise_bytes(model, is_fused=layout.has_fused_kernels)
        elementwise = rates.elementwise * num_bytes * tokens * width * share / device.memory_rate
        launches = BLOCK_SECONDS
        forward = products + attention + elementwise + launches
        backward = sum(each for _, each in passes) + 2.5 * attention + 2 * elementwise
        backward += 2 * launches
        backward += self._accumulation(layout, sharded_numel(model, layout) / ranks)
        if layout.expert > 1:  # experts are not sharded further
            added = self._accumulation(replace(layout, zero=1), here * model.expert_numel)
            backward += added
        recompute = 0.0
        if layout.recompute == "full":
            recompute = forward
        elif layout.recompute == "alternate":
            recompute = products / 2 + elementwise + launches
        elif layout.recompute == "selective":
            recompute = elementwise + launches if model.has_flash else attention
        recompute *= layout.recompute_share
        again = layout.recompute_share if layout.recompute == "full" else 0.0
        reduced = 4 + 2 * again
        activation = HALF * tokens * width
        tensor = reduced * self.links.all_reduce(groups["tensor"], activation)
        if layout.has_async_tensor:
            tensor *= 1 - HIDDEN_BY_ASYNC
        context = 0.0
        if layout.context > 1:  # keys and values of the sequence, and their gradients
            keys = HALF * 2 * tokens * layout.context * model.kv_width / ranks
            context = (3 + again) * self.links.ring(groups["context"], keys)
            if layout.has_context_overlap:
                context = max(0.0, context - 0.5 * 3.5 * attention)
        expert = (2 + again) * self._exchange(groups, tokens / whole)
        return Passes(forward, backward, recompute, tensor, context, expert)

    def _exchange(self, groups: dict[str, AxisGroup], tokens: float) -> float:
        """Return the seconds in which rows go to their experts and come back, in one pass.

        A row goes to a rank once, however many of its experts are there; each expert is as likely.
        """
        model, group = self.model, groups["expert"]
        if group.size == 1:
            return 0.0
        elsewhere = model.experts - model.experts // group.size
        arrives = 1 - comb(elsewhere, model.active) / comb(model.experts, model.active)
        row = HALF * model.hidden * tokens * arrives
        return 2 * self.links.exchange(group, row)

    def _logits(self, layout: Layout, groups: dict[str, AxisGroup]) -> Passes:
        model, device = self.model, self.cluster.accelerator
        tokens, columns = self._tokens(layout), model.vocab / layout.tensor
        forward, backward = self._product("bf16", tokens, model.hidden, columns)
        softmax = 12.0 * tokens * columns / device.memory_rate
        tensor = 2 * self.links.all_reduce(groups["tensor"], HALF * tokens * model.hidden)
        backward += softmax + self._accumulation(layout, model.hidden * columns)
        return Passes(forward + softmax, backward, 0.0, tensor, 0.0, 0.0)

    def _product(
        self, dtype: str, rows: float, inner: float, columns: float
    ) -> tuple[float, float]:
        """Return the seconds of (rows, inner) times (inner, columns), forward and backward."""
        device = self.cluster.accelerator
        machine = (device.matmul_rate(dtype) * self.rates.matmul, device.units, device.memory_rate)
        forward = product_time(rows, inner, columns, *machine)
        of_input = product_time(rows, columns, inner, *machine)
        backward = of_input + product_time(inner, rows, columns, *machine)
        if dtype != "bf16":  # both factors of each product are scaled to the narrow type
            forward += CAST_BYTES * (rows * inner + inner * columns) / device.memory_rate
            backward += CAST_BYTES * rows * columns / device.memory_rate
        return forward, backward

    def _accumulation(self, layout: Layout, numel: float) -> float:
        """Return the seconds in which a microbatch's gradients are added to those before."""
        if layout.num_microbatches == 1:
            return 0.0
        width = 4 if layout.has_fp32_gradients else HALF
        shards = layout.num_shards if layout.zero >= 2 else 1
        return (HALF + 2 * width) * numel / shards / self.cluster.accelerator.memory_rate

    def _attention(self, layout: Layout, tokens: float) -> float:
        model, rates, device = self.model, self.rates, self.cluster.accelerator
        width = model.query_width / layout.tensor
        peak = device.flops["bf16"]
        if model.has_flash:
            reached = device.attention * model.seq / (model.seq + ATTENTION_HALF_SEQUENCE)
            reached *= layout.attention_speed
            return 2.0 * model.seq * width * tokens / (peak * reached)
        heads = model.heads / layout.tensor
        products = 4.0 * model.seq * width * tokens / (peak * rates.matmul * 0.7)
        head_size = model.query_width / model.heads
        unaligned = 1.0 if head_size % 8 == 0 else 3.0  # tensor cores take multiples of 8
        return unaligned * products + SCORE_BYTES * heads * model.seq * tokens / device.memory_rate

    # Communication.

    def _message(self, layout: Layout, group: AxisGroup) -> float:
        """Return the seconds of a message from a stage to the next."""
        num_bytes = HALF * self._tokens(layout) * self.model.hidden / layout.tensor
        return self.links.message(group, num_bytes)

    def _bubble(self, layout: Layout, stage: float, message: float) -> float:
        if layout.pipeline == 1:
            return 0.0
        part = schedule_kind(layout.schedule or "1f1b").bubble_over_1f1b
        part = 1.0 / layout.stages_per_rank if part is None else part
        waiting = (layout.pipeline - 1) * part * (stage + 2 * message)
        # Messages of an interleaved schedule are many, and not all behind computation.
        exposed = layout.num_microbatches * (layout.stages_per_rank - 1) * message
        return waiting + exposed

    def _gather(self, layout: Layout, group: AxisGroup) -> float:
        """Return the seconds of the gathers and scatters of ZeRO-3."""
        blocks, _ = blocks_of_rank(self.model.layers, layout)
        shards = layout.num_shards
        sharing = AxisGroup(shards, min(shards, group.in_node))
        num_bytes = HALF * blocks * sharded_numel(self.model, layout) / layout.tensor
        passes = 1 if layout.pipeline > 1 else layout.num_microbatches
        moved = 3 * passes * self.links.ring(sharing, num_bytes)
        gathers = blocks
        if layout.tile_bytes is not None:
            gathers = blocks * ceil(4 * sharded_numel(self.model, layout) / layout.tile_bytes)
        return moved + 3 * passes * (gathers - 1) * self.links.latency(sharing) * log2(
            max(2, shards)
        )

    def _reduction(self, layout: Layout, group: AxisGroup, parameters: float) -> float:
        if group.size == 1:
            return 0.0
        width = 4 if layout.has_fp32_gradients else HALF
        if layout.zero == 3:
            replicas = group.size // layout.num_shards
            across = AxisGroup(replicas, max(1, group.in_node // layout.num_shards))
            moved = self.links.all_reduce(across, width * parameters / layout.num_shards)
        else:
            moved = self.links.all_reduce(group, width * parameters)
        if layout.expert > 1:
            copies = layout.data * layout.context * layout.tensor // layout.expert
            in_node = group.in_node * layout.tensor // layout.expert
            same = AxisGroup(copies, max(1, in_node))
            moved += self.links.all_reduce(same, width * experts_of_rank(self.model, layout))
        return moved

    def _optimizer(self, layout: Layout, parameters: float) -> float:
        updated = parameters / layout.num_shards + experts_of_rank(self.model, layout)
        outside = 0.0 if layout.offload == "none" else layout.offload_fraction * updated
        on_device = OPTIMIZER_BYTES * (updated - outside) / self.cluster.accelerator.memory_rate
        moved = 2 * HALF * outside / self.cluster.accelerator.host_rate
        if layout.tier == "nvme":
            moved = max(moved, STATE_BYTES * outside / DISK_RATE)
        return max(on_device, moved, outside / HOST_OPTIMIZER_RATE)

    def _transfer(self, layout: Layout, parameters: float) -> float:
        """Return the seconds of transfers of parameters and gradients from and to the host."""
        if layout.offload != "all":
            return 0.0
        num_bytes = (2 * HALF + 4) * parameters / layout.num_shards
        moved = layout.num_microbatches * num_bytes / self.cluster.accelerator.host_rate
        if layout.tier == "nvme":  # read for the forward and for the backward pass
            shards = 2 * HALF * parameters / layout.num_shards
            moved = max(moved, layout.num_microbatches * shards / DISK_RATE)
        return moved


def factor_of(cluster: Cluster, rates: Rates) -> float:
    """Return the additional time of a step on several nodes."""
    return 1.0 + rates.straggler * log2(max(1, cluster.num_nodes))


def elementwise_bytes(model: Transformer, *, is_fused: bool) -> float:
    """Return the traffic of a block's operators that are no products, forward.

    In bytes for each token and unit of width, counted from the tensors that the operators read and
    write: norms (in fp32 where they are not fused), residuals, rotary positions of gated models,
    and the activation between the feed-forward layers.
    """
    up = model.ffn / model.hidden
    if model.is_gated:
        return 25.0 + 6.0 * up if is_fused else 110.0 + 10.0 * up
    return 24.0 + 4.0 * up if is_fused else 58.0 + 4.0 * up


@cache
def product_time(
    rows: float, inner: float, columns: float, rate: float, units: int, memory_rate: float
) -> float:
    """Return the seconds of one matrix product on an accelerator with ``units`` units.

    Each unit computes a tile at a time. The last wave of tiles takes as long as a full one, however
    few tiles it has, and a long sum may be split over several units, which add their parts.
    """
    found = float("inf")
    for high, wide, share in TILES:
        tiles = ceil(rows / high) * ceil(columns / wide)
        for split in (1, 2, 4, 8):
            waves = ceil(tiles * split / units)
            summed = 2.0 * high * wide * inner / split * units / (rate * share)
            tile = TILE_SECONDS + summed + HALF * high * wide * units / memory_rate
            added = 8.0 * rows * columns * split / memory_rate if split > 1 else 0.0
            found = min(found, waves * tile + added)
    return max(found, HALF * (rows * inner + inner * columns + rows * columns) / memory_rate)


def blocks_of_rank(layers: int, layout: Layout) -> tuple[int, int]:
    """Return the blocks of the rank that has most, and of the rank with the logits."""
    stages = layout.pipeline * layout.stages_per_rank
    if layout.pipeline > 1 and (layers + 2) % stages == 0:
        return (layers + 2) // layout.pipeline, (layers + 2) // layout.pipeline - 1  # as a block
    most = layers // stages * layout.stages_per_rank
    most += -(-(layers % stages) // layout.pipeline)  # the rest goes round the ranks
    return most, most


def sharded_numel(model: Transformer, layout: Layout) -> int:
    """Return the parameters of a block that ZeRO shards: all but experts that are divided."""
    return model.block_numel if layout.expert == 1 else model.shared_numel


def experts_of_rank(model: Transformer, layout: Layout) -> float:
    """Return the parameters of divided experts that a rank keeps whole."""
    if layout.expert == 1:
        return 0.0
    blocks, _ = blocks_of_rank(model.layers, layout)
    return float(blocks * model.experts // layout.expert * model.expert_numel)


def parameters_of_rank(model: Transformer, layout: Layout) -> float:
    """Return the parameters of the rank that has most, before ZeRO shards them."""
    most, _ = blocks_of_rank(model.layers, layout)
    blocks = most * sharded_numel(model, layout) / layout.tensor
    tables = model.vocab * model.hidden / layout.tensor
    both = layout.pipeline == 1 and not model.is_tied
    return blocks + (2 if both else 1) * tables


def model_flops_utilization(
    model: Transformer, device: Accelerator, layout: Layout, seconds: float
) -> float:
    """Return MFU: model FLOPs (without recomputation) over the peak of the devices."""
    peak = device.flops.get(layout.dtype, device.flops["bf16"])
    return model.step_flops(layout.sequences) / (seconds * layout.num_devices * peak)
