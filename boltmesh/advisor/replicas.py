"""Predicts layouts of whole models: replicas, ZeRO stages and offload to the host."""

from dataclasses import dataclass, replace
from math import ceil

from boltmesh.advisor.layouts import ConfigLayout, PlannedLayout
from boltmesh.advisor.machine import Hardware
from boltmesh.advisor.prediction import Collective, RankStep, predict_step
from boltmesh.plan.strategy_options import sharing_of
from boltmesh.strategies.cost_model.memory import MemoryEstimate, estimate_memory
from boltmesh.strategies.cost_model.model import (
    Activations,
    JobShape,
    ModelShape,
    ShardingLayout,
    StepWork,
    UnitShape,
)
from boltmesh.strategies.cost_model.step_time import estimate_step_time
from boltmesh.strategies.cost_model.traffic import OperatorBytes, estimate_traffic
from boltmesh.strategies.registry import STRATEGIES

REPLICA = ShardingLayout("replicas", 0)
REPLICATED = ("bolt_ddp", "bolt_zero1", "bolt_zero2", "bolt_zero3")
OFFLOADED = ("bolt_zero1_cpu", "bolt_zero3_cpu")
ON_DISK = "bolt_zero3_nvme"
PARTS = (0.25, 0.5, 0.75)
"""Shares of the blocks that are recomputed, and of the optimizer state that leaves the device."""
TILES = {"tile_linear_bytes": 64 * 2**20}
TIGHT = 0.93
"""Share of a rank's memory above which a layout may run out of it."""
EASE = 0.01
"""How much slower a layout may be for each mechanism that it does not need."""


def plan_replicas(
    model: ModelShape,
    layout: ConfigLayout,
    job: JobShape,
    hardware: Hardware,
    *,
    scale: float = 1.0,
    experts: "OwnedExperts | None" = None,
) -> PlannedLayout:
    """Return what a layout without pipeline and tensor axis needs.

    Args:
        model: With the work of one batch.
        layout: By the name of its strategy.
        job: Ranks and batches of the layout.
        hardware: What it is for.
        scale: Rows of the layout's batch over those of the model's.
        experts: Those that are divided over ranks.
    """
    assert model.work is not None
    activations = model.activations and Activations(
        ceil(model.activations.saved_bytes * scale),
        ceil(model.activations.transient_bytes * scale),
        model.activations.how,
    )
    model = replace(
        model,
        activations=activations,
        forward_flops=ceil((model.forward_flops or 0) * scale),
    )
    assert model.work is not None
    whole = model
    if experts is not None:
        model, owned = experts.split(model)
    sharing = sharing_of(layout.name, STRATEGIES[layout.name], layout.arguments)
    shards = job.num_shards if sharing.stage else 1
    parts = estimate_step_time(model, sharing, job, hardware.machine)
    bus, host, disk = (each or 0.0 for each in (parts.bus_s, parts.host_s, parts.disk_s))
    has_parameters = sharing.parameter_place == "device"
    outside = 1.0 if not has_parameters else layout.arguments.get("offload_fraction", 1.0)
    on_device = 1.0 - outside if sharing.has_engine else 1.0
    memory, stepped = estimate_memory(model, sharing, job), 0.0
    exchanged: tuple[Collective, ...] = ()
    assert whole.work is not None
    if experts is not None:
        of_owned = estimate_memory(owned, REPLICA, replace(job, num_ranks=experts.num_copies))
        memory = memory.beside(of_owned)
        exchanged, stepped = experts.traffic, owned.trained_numel
    step = RankStep(
        work=scaled(whole.work, scale),
        batches=layout.accumulate,
        sizes=layout.sizes,
        microbatches=1,
        bubble=0.0,
        traffic=tuple(
            Collective("data", each.operator, each.calls, each.whole_bytes, _group(each, job))
            for each in estimate_traffic(model, sharing, job)
        )
        + exchanged,
        is_gathering=sharing.stage == 3,
        stepped_numel=on_device * model.trained_numel / shards + stepped,
        stepped_tensors=sum(len(each.tensors) for each in whole.units),
        state_copies=job.state_copies,
        transfer_s=0.0 if has_parameters else bus,
        outside_s=max(host, disk, bus if has_parameters else 0.0),
    )
    return judged(layout, memory, hardware, step)


@dataclass(frozen=True)
class OwnedExperts:
    """Experts that are divided over ranks, each of which keeps its own whole.

    Attributes:
        names: Their parameters.
        size: Ranks that have all of them together.
        num_copies: Ranks that have the same ones.
        traffic: Exchanges of rows, and sums of gradients over the copies.
    """

    names: frozenset[str]
    size: int
    num_copies: int
    traffic: tuple[Collective, ...]

    def split(self, model: ModelShape) -> tuple[ModelShape, ModelShape]:
        """Return the model without its experts, and the experts of one rank."""
        rest, owned = [], []
        for unit in model.units:
            others = tuple(each for each in unit.tensors if each.name not in self.names)
            rest.append(replace(unit, tensors=others))
            owned += [
                replace(each, shape=(ceil(each.shape[0] / self.size), *each.shape[1:]))
                for each in unit.tensors
                if each.name in self.names
            ]
        units = (UnitShape("experts", tuple(owned)),)
        return replace(model, units=tuple(rest)), ModelShape("experts", units)


def _group(moved: OperatorBytes, job: JobShape) -> int:
    """Return the ranks of a collective: those of a copy, or its copies for an all-reduce."""
    copies = job.num_ranks // job.num_shards
    if moved.operator != "all-reduce":
        return job.num_shards
    return copies if copies > 1 else job.num_ranks


def judged(
    layout: ConfigLayout, memory: MemoryEstimate, hardware: Hardware, step: RankStep
) -> PlannedLayout:
    """Return a layout with its predicted time, and whether it fits."""
    machine = hardware.machine
    sizes = [
        (amount, room)
        for place, amount in memory.peak.items()
        if (room := machine.size_of(place)) is not None
    ]
    return PlannedLayout(
        layout,
        predict_step(step, hardware).terms(),
        memory,
        machine.places_too_small_for(memory.peak),
        is_tight=any(amount > TIGHT * room for amount, room in sizes),
        step=step,
    )


def order(planned: PlannedLayout) -> tuple[bool, bool, float]:
    """Return a key that sorts layouts: those that fit, those with room, the fastest first."""
    seconds = planned.seconds * (1 + EASE * planned.layout.num_mechanisms)
    return not planned.fits, planned.is_tight, seconds


def scaled(work: StepWork, scale: float) -> StepWork:
    """Return the work of a batch of another size."""
    products = {shape: count * scale for shape, count in work.products.items()}
    return StepWork(
        ceil(work.flops * scale),
        ceil(work.moved_bytes * scale),
        work.operators,
        products,
        ceil(work.product_bytes * scale),
    )


def between(model: ModelShape, again: ModelShape, part: float) -> ModelShape:
    """Return a model of which a part of the blocks is recomputed.

    Args:
        model: With no block recomputed.
        again: With all of them.
        part: Share of the blocks.
    """

    def mean(one: int, other: int) -> int:
        return ceil((1 - part) * one + part * other)

    assert model.activations is not None
    assert again.activations is not None
    assert model.work is not None
    assert again.work is not None
    return replace(
        again,
        activations=replace(
            again.activations,
            saved_bytes=mean(model.activations.saved_bytes, again.activations.saved_bytes),
        ),
        work=StepWork(
            mean(model.work.flops, again.work.flops),
            mean(model.work.moved_bytes, again.work.moved_bytes),
            mean(model.work.operators, again.work.operators),
            {
                shape: (1 - part) * model.work.products.get(shape, 0) + part * count
                for shape, count in again.work.products.items()
            },
            mean(model.work.product_bytes, again.work.product_bytes),
        ),
    )
