"""Enumerates the layouts of a model on a cluster, and orders those that fit by predicted time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from boltmesh.errors import ConfigError
from boltmesh.planner.layout import Layout, Offload, Recompute
from boltmesh.planner.layout_memory import LayoutMemory, estimate_layout_memory
from boltmesh.planner.machine import Cluster
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
    budget = cluster.accelerator.memory_bytes
    found: list[Candidate] = []
    num_layouts, least = 0, float("inf")
    for layout in layouts(model, cluster, sequences=sequences, dtype=dtype):
        num_layouts += 1
        memory = estimate_layout_memory(model, layout)
        if memory.host <= cluster.accelerator.host_bytes:
            least = min(least, memory.device)
        if memory.device <= FULL * budget and memory.host <= cluster.accelerator.host_bytes:
            is_tight = memory.device > TIGHT * budget
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
    parts += (layout.context > 1) + (layout.expert > 1)
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
) -> Iterator[Layout]:
    """Yield every layout that the strategies can run."""
    devices = cluster.num_devices
    if model.experts:  # experts are divided beside ZeRO alone, as the strategies are
        if sequences % devices == 0:
            base = Layout(data=devices, sequences=sequences, dtype=dtype)
            for expert in _divisors(devices):
                if model.experts % expert == 0:
                    yield from _tuned(model, replace(base, expert=expert))
        return
    for tensor in _divisors(cluster.devices_per_node):
        if devices % tensor or not _divides_heads(model, tensor):
            continue
        for pipeline in _divisors(devices // tensor):
            if pipeline > model.layers:
                continue
            data = devices // (tensor * pipeline)
            if sequences % data:
                continue
            base = Layout(
                tensor=tensor,
                pipeline=pipeline,
                data=data,
                sequences=sequences,
                has_sequence_parallel=tensor > 1,
                dtype=dtype,
            )
            yield from _tuned(model, base)
    for context in _divisors(devices)[1:]:  # beside replicas alone, as the strategy is
        replicas = devices // context
        if sequences % replicas or model.seq < context * LEAST_POSITIONS:
            continue
        base = Layout(context=context, data=replicas, sequences=sequences, dtype=dtype)
        yield from _tuned(model, base)


def _tuned(model: Transformer, base: Layout) -> Iterator[Layout]:
    per_replica = base.sequences // base.data
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    for microbatch in MICROBATCH_SIZES:
        if per_replica % microbatch:
            continue
        for schedule, stages in SCHEDULES.items() if base.pipeline > 1 else [("", 1)]:
            count = per_replica // microbatch
            if schedule and not _can_run(model, base.pipeline, schedule, stages, count):
                continue
            sized = replace(base, microbatch=microbatch, schedule=schedule, stages_per_rank=stages)
            for recompute in kinds:
                if recompute != "none" and schedule in {"zero_bubble", "zbv"}:
                    continue  # they halve backward passes, which recomputation joins
                for zero, offload in _sharding(base):
                    yield replace(sized, recompute=recompute, zero=zero, offload=offload)


def _sharding(base: Layout) -> list[tuple[int, Offload]]:
    """Return the ZeRO stages and tiers to try; with a pipeline those that reduce once a step."""
    if base.expert > 1:
        return [(1, "none"), (2, "none"), (3, "none")]
    if base.context > 1:
        return [(0, "none"), (1, "none"), (2, "none"), (3, "none")]
    if base.data == 1:
        alone: list[tuple[int, Offload]] = [(0, "none"), (1, "optimizer"), (3, "all")]
        return alone[: 2 if base.pipeline > 1 else 3]
    if base.pipeline > 1:
        return [(0, "none"), (1, "none"), (1, "optimizer")]
    return [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "optimizer"), (3, "all")]


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
    cluster, device = found.cluster, found.cluster.accelerator
    devices = cluster.num_devices
    while devices < 65_536:
        devices *= 2
        larger = replace(cluster, num_devices=devices)
        for layout in layouts(
            found.model, larger, sequences=max(found.sequences, devices), dtype=found.dtype
        ):
            memory = estimate_layout_memory(found.model, layout)
            if memory.device <= TIGHT * device.memory_bytes and memory.host <= device.host_bytes:
                return devices
    return None
