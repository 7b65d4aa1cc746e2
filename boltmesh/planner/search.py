"""Enumerates the layouts of a model on a cluster, and orders those that fit by predicted time."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from operator import itemgetter
from typing import Any, Protocol, TypeVar

from boltmesh.axes import divisors
from boltmesh.errors import ConfigError
from boltmesh.planner.layout import Layout, Recompute, Tier
from boltmesh.planner.layout_memory import LayoutMemory, estimate_layout_memory
from boltmesh.planner.machine import DISK_BYTES, Cluster, more_devices
from boltmesh.planner.rates import default_rates
from boltmesh.planner.step_time import PredictedStepTime, StepTimeModel
from boltmesh.planner.transformer import Transformer
from boltmesh.schedule_sim import StageTimes
from boltmesh.strategies.pipeline.schedules.registry import (
    check_schedule,
    closed_form_bubble,
    schedule_kind,
    searched_schedules,
)

TIGHT, FULL = 0.93, 1.07
"""Shares of a device's memory: a layout above the first may run out of memory, one above the second
will. The second rejects 6 of 7 published runs that failed, and 27 of 370 that fitted, half of them
on one stack of 2021."""

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
    """A layout with its predicted time and memory."""

    layout: Layout
    time: PredictedStepTime
    memory: LayoutMemory
    is_tight: bool
    """Its memory differs from that of a device by less than the error of the prediction."""

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
    """The layouts that fit, the fastest first; tight ones last."""
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
) -> Search:
    """Find the layouts that fit, ordered by the predicted time of a step.

    Args:
        model: Sizes of the model.
        cluster: Where it trains.
        sequences: Sequences of a step over all ranks.
        dtype: Type of the matrix products.
    """
    predictor = StepTimeModel(model, cluster, default_rates())
    found: list[Candidate] = []
    num_layouts, least = 0, float("inf")
    for layout, memory in layouts(model, cluster, sequences=sequences, dtype=dtype):
        num_layouts += 1
        if _fits_elsewhere(memory, cluster):
            least = min(least, memory.device)
        if _fits(memory, cluster, FULL):
            is_tight = not _fits(memory, cluster, TIGHT)
            found.append(Candidate(layout, predictor.predict(layout), memory, is_tight))
    ordered = _ordered(found, predictor)
    return Search(model, cluster, sequences, dtype, ordered, num_layouts, least)


def on_network(found: Search, network_rate: float) -> Search:
    """Return the layouts that were found as they are predicted on another network.

    Args:
        found: The layouts.
        network_rate: From a device to other nodes, bytes per second.
    """
    cluster = replace(found.cluster, network_rate=network_rate)
    predictor = StepTimeModel(found.model, cluster, default_rates())
    again = [replace(each, time=predictor.predict(each.layout)) for each in found.candidates]
    return replace(found, cluster=cluster, candidates=_ordered(again, predictor))


def _ordered(candidates: Iterable[Candidate], predictor: StepTimeModel) -> tuple[Candidate, ...]:
    found = sorted(candidates, key=_rank)
    best = [_with_bubble(each, predictor) for each in _distinct(found)[:NUM_FINALISTS]]
    chosen = {each.layout for each in best}
    rest = [each for each in found if each.layout not in chosen]
    return (*sorted(best, key=_rank), *rest)


def _rank(candidate: Candidate) -> tuple[bool, float]:
    # The simpler one of two that are equal within any error.
    ease = 1 + EASE * candidate.layout.num_mechanisms
    return candidate.is_tight, candidate.seconds * ease


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the best of each division of the devices, then the others."""
    first: dict[object, Candidate] = {}
    for each in candidates:
        first.setdefault(each.layout.division, each)
    best = list(first.values())
    chosen = set(map(id, best))
    return best + [each for each in candidates if id(each) not in chosen][:NUM_FINALISTS]


# The rules for layouts, of sizes and of a config's own model.


@dataclass(frozen=True)
class Allowed:
    """Limits of layouts, by a model and its devices.

    Attributes:
        devices: Ranks of the job.
        per_node: Ranks of a node.
        stages: Most stages.
        positions: Most ranks of a context group.
        tensors: Ranks that may share a layer.
        experts: Ranks that may divide the experts of a layer, above one.
        recompute: Kinds of recomputation that blocks allow.
        places: Where state may go: ``cpu``, ``nvme``.
        has_tiles: Whether large weights may be gathered in tiles.
        has_whole_sequences: Whether ranks that divide layers may leave the sequence whole, too.
    """

    devices: int
    per_node: int
    stages: int
    positions: int
    tensors: Sequence[int]
    experts: Sequence[int] = ()
    recompute: Sequence[Recompute] = ("none", "selective", "full")
    places: Sequence[Tier] = ("cpu", "nvme")
    has_tiles: bool = True
    has_whole_sequences: bool = False


def divisions(allowed: Allowed) -> Iterator[Layout]:
    """Yield the sizes of the axes."""
    for tensor in allowed.tensors:
        for pipeline in divisors(allowed.devices):
            for context in divisors(allowed.devices):
                replica = tensor * pipeline * context
                if allowed.devices % replica or pipeline > allowed.stages:
                    continue
                if context > allowed.positions:
                    continue
                base = Layout(
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    data=allowed.devices // replica,
                )
                yield base
                # The experts of a stage are divided over ranks of all other axes.
                ranks = allowed.devices // pipeline
                yield from (base.changed(expert=n) for n in allowed.experts if ranks % n == 0)


def by_prediction(bases: Iterable[Layout], candidates: Iterable[Candidate]) -> list[Layout]:
    """Return divisions in the order of candidates, then the others by kind."""
    place: dict[tuple[int, ...], int] = {}
    for each in candidates:
        place.setdefault(each.layout.axis_sizes, len(place))
    return sorted(by_kind(bases), key=lambda base: place.get(base.axis_sizes, len(place)))


def by_kind(bases: Iterable[Layout]) -> list[Layout]:
    """Return divisions by turns from each set of axes, those into fewest parts first."""
    turns: Counter[tuple[bool, ...]] = Counter()
    keyed: list[tuple[tuple[int, ...], Layout]] = []
    for base in sorted(bases, key=_parts):
        _, *sizes = _parts(base)
        kind = tuple(size > 1 for size in sizes)
        keyed.append(((turns[kind], sum(kind), *kind, *_parts(base)), base))
        turns[kind] += 1
    return [base for _, base in sorted(keyed, key=itemgetter(0))]


def _parts(base: Layout) -> tuple[int, ...]:
    sizes = base.context, base.expert, base.pipeline, base.tensor
    return prod(sizes), *sizes


def _zero_stages(base: Layout) -> tuple[int, ...]:
    """Return the ZeRO stages to try.

    Beside a pipeline stages 2 and 3 have all parameters of a rank for a batch, and save nothing.
    """
    stages: tuple[int, ...] = (0, 1)
    if base.pipeline == 1:
        stages = (0, 1, 2, 3) if base.data * base.context > 1 else (0, 1, 3)
    return tuple(each for each in stages if each or base.expert == 1)


class Evaluated(Protocol):
    """A layout with its memory."""

    @property
    def has_room(self) -> bool:
        """Whether it fits beyond the error of the prediction."""


E = TypeVar("E", bound=Evaluated)


def with_room(
    base: Layout,
    allowed: Allowed,
    evaluate: Callable[[Layout], E | None],
    *,
    may_be_best: Callable[[E], bool] = lambda _: True,
) -> Iterator[E]:
    """Yield a layout with each ZeRO stage, with less kept on the device until it has room.

    What takes time to save memory (recomputation, shards over more ranks, tiles, offload) is added
    in the smallest part that is enough.

    Args:
        base: Its axes.
        allowed: Mechanisms that may be added.
        evaluate: Returns the memory of a layout; None where it cannot run.
        may_be_best: Whether one that has no room is fast enough for more to be added.
    """
    for zero in _zero_stages(base):
        at_stage = base.changed(zero=zero)
        found = list(_with_sequence(at_stage, allowed, evaluate, may_be_best))
        yield from found
        if base.data * base.context == 1 and any(each.has_room for each in found):
            return  # without replicas the other stages are for offload alone


def _with_sequence(
    base: Layout,
    allowed: Allowed,
    evaluate: Callable[[Layout], E | None],
    may_be_best: Callable[[E], bool],
) -> Iterator[E]:
    """Yield a layout as it is, and with the sequence divided between divided layers.

    The latter keeps less, so what saves memory beside that is tried for it alone. On accelerators
    it also moves as many bytes and computes less, so the former is for models that cannot do it.
    """
    if base.tensor > 1 and base.expert == 1 and not base.has_sequence_parallel:
        divided = base.changed(has_sequence_parallel=True)
        found = list(_at_stage(divided, allowed, evaluate, may_be_best))
        if found:
            if allowed.has_whole_sequences and (whole := evaluate(base)) is not None:
                yield whole
            yield from found
            return
    yield from _at_stage(base, allowed, evaluate, may_be_best)


def _at_stage(
    base: Layout,
    allowed: Allowed,
    evaluate: Callable[[Layout], E | None],
    may_be_best: Callable[[E], bool],
) -> Iterator[E]:
    kinds = allowed.recompute
    if base.schedule and schedule_kind(base.schedule).splits_backward:
        kinds = kinds[:1]  # they halve backward passes, which recomputation joins
    for kind in kinds:
        has_room, is_first = False, True
        for place in _places(base, allowed):
            layout = base.changed(recompute=kind, **place)
            if (made := evaluate(layout)) is None:
                return
            has_room = made.has_room
            yield _least(layout, made, evaluate) if has_room else made
            if has_room:
                break
            if kind == "none" and is_first and not may_be_best(made):
                return
            is_first = False
        if has_room and is_first:
            return  # nothing need be recomputed, or sharded or offloaded further


def _least(layout: Layout, made: E, evaluate: Callable[[Layout], E | None]) -> E:
    """Return the layout with as little recomputation and offload as leaves it room."""
    names = ["recompute_share"] if layout.recompute == "full" else []
    names += ["offload_fraction"] if layout.offload == "optimizer" else []
    for name in names:
        for part in PARTS:
            less = layout.changed(**{name: part})
            found = evaluate(less)
            if found is not None and found.has_room:
                layout, made = less, found
                break
    return made


def _places(base: Layout, allowed: Allowed) -> Iterator[dict[str, Any]]:
    """Yield what a rank shares with others or moves elsewhere, what costs least first."""
    is_replicated = not base.is_divided and base.expert == 1
    if base.zero == 3 and is_replicated:
        for size in divisors(base.data)[:-1]:
            if size % allowed.per_node == 0:
                yield {"shard": size}
    if not base.zero or base.data * base.context > 1:
        yield {}
    has_tiles = allowed.has_tiles and base.zero == 3 and is_replicated
    if has_tiles:
        yield {"tile_bytes": TILE_BYTES}
    if not base.zero or base.expert > 1:
        return
    for tier in allowed.places:
        if tier == "cpu" or base.zero == 1:
            yield {"offload": "optimizer", "tier": tier}
        if base.zero == 3:
            yield {"offload": "all", "tier": tier}
            if tier == "nvme" and has_tiles:
                yield {"offload": "all", "tier": tier, "tile_bytes": TILE_BYTES}


# Layouts of sizes.


@dataclass(frozen=True)
class _Fitted:
    layout: Layout
    memory: LayoutMemory
    has_room: bool


def layouts(
    model: Transformer, cluster: Cluster, *, sequences: int, dtype: str
) -> Iterator[tuple[Layout, LayoutMemory]]:
    """Yield the layouts that the strategies can run, with their memory."""
    allowed = Allowed(
        devices=cluster.num_devices,
        per_node=cluster.devices_per_node,
        stages=model.layers,
        positions=max(1, model.seq // LEAST_POSITIONS),
        tensors=[n for n in divisors(cluster.devices_per_node) if _divides_heads(model, n)],
        experts=[n for n in divisors(cluster.num_devices)[1:] if model.experts % n == 0]
        if model.experts
        else (),
    )

    def evaluate(layout: Layout) -> _Fitted:
        memory = estimate_layout_memory(model, layout)
        return _Fitted(layout, memory, _fits(memory, cluster, TIGHT))

    for axes in divisions(allowed):
        if sequences % axes.data:
            continue
        base = axes.changed(
            sequences=sequences,
            has_sequence_parallel=axes.tensor > 1 and axes.expert == 1,
            dtype=dtype,
        )
        for schedule in searched_schedules() if base.pipeline > 1 else [""]:
            for sized in _sized(model, base.changed(schedule=schedule)):
                fits = False
                for each in with_room(sized, allowed, evaluate):
                    fits |= _fits(each.memory, cluster, FULL)
                    yield each.layout, each.memory
                if not fits:
                    break  # nor do larger microbatches


def _sized(model: Transformer, base: Layout) -> Iterator[Layout]:
    """Yield microbatches, the smallest first."""
    per_replica = base.sequences // base.data
    stages = schedule_kind(base.schedule).default_stages_per_rank if base.schedule else 1
    for microbatch in MICROBATCH_SIZES:
        if per_replica % microbatch:
            continue
        count = per_replica // microbatch
        if base.schedule and not _can_run(model, base.pipeline, base.schedule, stages, count):
            continue
        yield base.changed(microbatch=microbatch, stages_per_rank=stages)


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
        larger = more_devices(cluster, devices)
        sequences = max(found.sequences, devices)
        tried = layouts(found.model, larger, sequences=sequences, dtype=found.dtype)
        if any(_fits(memory, larger, TIGHT) for _, memory in tried):
            return devices
    return None
