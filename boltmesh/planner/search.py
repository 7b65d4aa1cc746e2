"""Enumerates the layouts of a model on a cluster, and orders those that fit by predicted time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from boltmesh.errors import ConfigError
from boltmesh.planner.layout import Layout, Recompute
from boltmesh.planner.layout_memory import LayoutMemory, estimate_layout_memory
from boltmesh.planner.machine import DISK_BYTES, Cluster
from boltmesh.planner.rates import Rates, default_rates
from boltmesh.planner.step_time import PredictedStepTime, StepTimeModel
from boltmesh.planner.transformer import Transformer
from boltmesh.schedule_sim import StageTimes
from boltmesh.strategies.pipeline.schedules.registry import check_schedule, closed_form_bubble

TIGHT, FULL = 0.93, 1.07
"""Shares of a device's memory: a layout above the first may run out of memory, one above the second
will. The second rejects 6 of 7 published runs that failed, and 27 of 370 that fitted, half of them
on one stack of 2021."""

SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 1, "zbv": 2}
"""The schedules that are tried, and the stages of a rank."""
NUM_FINALISTS = 24
"""So many of the best layouts have the bubble of their schedule computed."""
EASE = 0.003
"""How much slower a layout may be for each mechanism that it does not need."""
LEAST_POSITIONS = 1024
"""Positions of a rank of a context group; with fewer, its operators cost more than they save."""
MICROBATCH_SIZES = (1, 2, 4, 8, 16, 32)
PARTS = (0.25, 0.5, 0.75)
"""Shares of the blocks that are recomputed, and of the optimizer state that leaves the device."""
TILE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Candidate:
    """A layout with what it is predicted to take."""

    layout: Layout
    time: PredictedStepTime
    memory: LayoutMemory
    is_tight: bool
    """Its memory is within the error of the prediction of what a device has."""

    @property
    def seconds(self) -> float:
        """Predicted time of one step."""
        return self.time.seconds


@dataclass(frozen=True)
class Search:
    """The layouts for one model, cluster and batch."""

    model: Transformer
    cluster: Cluster
    sequences: int
    dtype: str
    candidates: tuple[Candidate, ...]
    """Those that fit, the fastest first; tight ones behind all others."""
    num_layouts: int
    """Enumerated."""
    least_memory: float
    """Bytes per device of the layout that needs least."""


def search(
    model: Transformer,
    cluster: Cluster,
    *,
    sequences: int,
    dtype: str = "bf16",
    rates: Rates | None = None,
) -> Search:
    """Find the layouts that fit, ordered by the predicted time of a step.

    Args:
        model: Sizes of the model.
        cluster: Where it trains.
        sequences: Sequences of a step over all ranks.
        dtype: Type of the matrix products.
        rates: Rates of the cluster, by default those of published runs.
    """
    predictor = StepTimeModel(model, cluster, rates or default_rates())
    found: list[Candidate] = []
    num_layouts, least = 0, float("inf")
    for layout, memory in layouts(model, cluster, sequences=sequences, dtype=dtype):
        num_layouts += 1
        if _fits_elsewhere(memory, cluster):
            least = min(least, memory.device)
        if _fits(memory, cluster, FULL):
            is_tight = not _fits(memory, cluster, TIGHT)
            found.append(Candidate(layout, predictor.predict(layout), memory, is_tight))
    found.sort(key=_rank)
    best = [_with_bubble(each, predictor) for each in _distinct(found)[:NUM_FINALISTS]]
    chosen = {each.layout for each in best}
    rest = [each for each in found if each.layout not in chosen]
    ordered = (*sorted(best, key=_rank), *rest)
    return Search(model, cluster, sequences, dtype, ordered, num_layouts, least)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    # The simpler one of two that are equal within any error.
    layout = candidate.layout
    parts = (layout.offload != "none") * 2 + (layout.pipeline > 1) + (layout.tensor > 1)
    parts += (layout.context > 1) + (layout.expert > 1) + (layout.tier == "nvme")
    parts += (layout.tile_bytes is not None) + (layout.shard is not None)
    return candidate.is_tight, candidate.seconds * (1 + EASE * (parts + layout.zero / 4))


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the best of each division of the devices, then the others."""
    first: dict[object, Candidate] = {}
    for each in candidates:
        first.setdefault(division(each.layout), each)
    best = list(first.values())
    return best + [each for each in candidates if each not in best][:NUM_FINALISTS]


def division(layout: Layout) -> tuple[int, int, int, int, int, int, str]:
    """Return what makes two layouts different in kind, not in tuning."""
    return (
        layout.tensor, layout.pipeline, layout.context, layout.expert, layout.data, layout.zero,
        layout.offload,
    )  # fmt: skip


def layouts(
    model: Transformer, cluster: Cluster, *, sequences: int, dtype: str
) -> Iterator[tuple[Layout, LayoutMemory]]:
    """Yield the layouts that the strategies can run, with their memory.

    What takes time to save memory (recomputation, shards over more ranks, tiles, offload) is added
    until a layout has room, in the smallest part that is enough.
    """
    for base in _divisions(model, cluster, sequences, dtype):
        for sized in _sized(model, base):
            for zero in _stages(base):
                yield from _with_room(model, cluster, replace(sized, zero=zero))


def _divisions(
    model: Transformer, cluster: Cluster, sequences: int, dtype: str
) -> Iterator[Layout]:
    """Yield the sizes of the axes."""
    devices = cluster.num_devices
    for tensor in _divisors(cluster.devices_per_node):
        if devices % tensor or not _divides_heads(model, tensor):
            continue
        for name, size in _beside(model, devices // tensor, tensor):
            data = devices // tensor if name == "expert" else devices // (tensor * size)
            if sequences % data:
                continue
            yield Layout(
                tensor=tensor,
                data=data,
                sequences=sequences,
                has_sequence_parallel=tensor > 1 and name != "expert",
                dtype=dtype,
                **{name: size},  # type: ignore[arg-type]
            )


def _beside(model: Transformer, ranks: int, tensor: int) -> Iterator[tuple[str, int]]:
    """Yield an axis beside tensor and data, and its size; the strategies have no two of them."""
    if model.experts:
        for size in _divisors(ranks * tensor):
            if model.experts % size == 0 and (size > 1 or tensor == 1):
                yield "expert", size
        return
    for size in _divisors(ranks):
        if size <= model.layers:
            yield "pipeline", size
        if size > 1 and model.seq >= size * LEAST_POSITIONS:
            yield "context", size


def _sized(model: Transformer, base: Layout) -> Iterator[Layout]:
    """Yield microbatches and schedules."""
    per_replica = base.sequences // base.data
    for microbatch in MICROBATCH_SIZES:
        if per_replica % microbatch:
            continue
        for schedule, stages in SCHEDULES.items() if base.pipeline > 1 else [("", 1)]:
            count = per_replica // microbatch
            if schedule and not _can_run(model, base.pipeline, schedule, stages, count):
                continue
            yield replace(base, microbatch=microbatch, schedule=schedule, stages_per_rank=stages)


def _stages(base: Layout) -> tuple[int, ...]:
    """Return the ZeRO stages to try; with a pipeline those that reduce once a step."""
    if base.pipeline > 1:
        return (0, 1) if base.data > 1 else (0,)
    if base.expert > 1:
        return 1, 2, 3
    return (0, 1, 2, 3) if base.data * base.context > 1 else (0, 1, 3)


def _with_room(
    model: Transformer, cluster: Cluster, base: Layout
) -> Iterator[tuple[Layout, LayoutMemory]]:
    """Yield a layout, then with less and less kept on the device, until it has room."""
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    if base.schedule in {"zero_bubble", "zbv"}:
        kinds = ("none",)  # they halve backward passes, which recomputation joins
    for kind in kinds:
        has_room, is_first = False, True
        for place in _places(base, cluster):
            layout = replace(base, recompute=kind, **place)
            memory = estimate_layout_memory(model, layout)
            has_room = _fits(memory, cluster, TIGHT)
            if has_room:
                layout = _least(model, cluster, layout)
                memory = estimate_layout_memory(model, layout)
            yield layout, memory
            if has_room:
                break
            is_first = False
        if has_room and is_first:
            return  # nothing need be recomputed, or sharded or offloaded further


def _least(model: Transformer, cluster: Cluster, layout: Layout) -> Layout:
    """Return the layout with as little recomputation and offload as leaves it room."""
    names = ["recompute_share"] if layout.recompute == "full" else []
    names += ["offload_fraction"] if layout.offload == "optimizer" else []
    for name in names:
        for part in PARTS:
            less = replace(layout, **{name: part})  # type: ignore[arg-type]
            if _fits(estimate_layout_memory(model, less), cluster, TIGHT):
                layout = less
                break
    return layout


def _places(base: Layout, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield what a rank shares with others or moves elsewhere, what costs least first."""
    is_replicated = base.pipeline == base.tensor == base.context == base.expert == 1
    if base.zero == 3 and is_replicated:
        for size in _divisors(base.data)[:-1]:
            if size % cluster.devices_per_node == 0:
                yield {"shard": size}
    if not base.zero or base.data * base.context > 1:
        yield {}
    if base.zero == 3 and is_replicated:
        yield {"tile_bytes": TILE_BYTES}
    if not base.zero or base.expert > 1:
        return
    yield {"offload": "optimizer"}
    if base.zero == 3:
        yield {"offload": "all"}
    if base.context > 1:
        return
    if base.zero == 1:
        yield {"offload": "optimizer", "tier": "nvme"}
    if base.zero == 3:
        yield {"offload": "all", "tier": "nvme"}
        if is_replicated:
            yield {"offload": "all", "tier": "nvme", "tile_bytes": TILE_BYTES}


def _fits(memory: LayoutMemory, cluster: Cluster, share: float) -> bool:
    """Whether a share of a device is enough, and the host and the disk."""
    has_room = memory.device <= share * cluster.accelerator.memory_bytes
    return has_room and _fits_elsewhere(memory, cluster)


def _fits_elsewhere(memory: LayoutMemory, cluster: Cluster) -> bool:
    return memory.host <= cluster.accelerator.host_bytes and memory.disk <= DISK_BYTES


def _can_run(
    model: Transformer, pipeline: int, schedule: str, stages_per_rank: int, count: int
) -> bool:
    if pipeline * stages_per_rank > model.layers:
        return False
    return _is_allowed(schedule, pipeline, count, stages_per_rank)


@cache
def _is_allowed(schedule: str, num_ranks: int, count: int, stages_per_rank: int) -> bool:
    try:
        check_schedule(
            schedule, num_ranks=num_ranks, num_microbatches=count, stages_per_rank=stages_per_rank
        )
    except ConfigError:
        return False
    return True


def _divides_heads(model: Transformer, tensor: int) -> bool:
    """Whether ranks get whole heads; fewer heads of keys than ranks are repeated."""
    if model.heads % tensor or model.ffn % tensor:
        return False
    return model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0


@cache
def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _with_bubble(candidate: Candidate, predictor: StepTimeModel) -> Candidate:
    """Replace the bubble by the published one of the schedule, where it has a closed form."""
    layout = candidate.layout
    if layout.pipeline == 1:
        return candidate
    (forward, backward), message = predictor.stage_times(layout)
    share = closed_form_bubble(
        layout.schedule,
        num_ranks=layout.pipeline,
        num_microbatches=layout.num_microbatches,
        stages_per_rank=layout.stages_per_rank,
        times=StageTimes.of(forward, backward),
    )
    if share is None:
        return candidate
    busy = layout.num_microbatches * layout.stages_per_rank * (forward + backward)
    bubble = busy * share / (1 - share) + 2 * (layout.pipeline - 1) * message
    return replace(candidate, time=replace(candidate.time, bubble=bubble))


def smallest_cluster(found: Search) -> int | None:
    """Return the least number of devices, in whole nodes, on which some layout fits.

    None if none of 65,536 does.
    """
    cluster = found.cluster
    devices = cluster.num_devices
    while devices < 65_536:
        devices *= 2
        larger = replace(cluster, num_devices=devices)
        sequences = max(found.sequences, devices)
        tried = layouts(found.model, larger, sequences=sequences, dtype=found.dtype)
        if any(_fits(memory, larger, TIGHT) for _, memory in tried):
            return devices
    return None
