"""Predicts the memory and the time of one layout, and whether it fits.

``plan_replicas`` is for whole models (replicas, ZeRO stages, offload), ``plan_divided`` for models
whose layers are divided, from their plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from boltmesh.advisor.layouts import ConfigLayout, PlannedLayout
from boltmesh.advisor.machine import HERE, Hardware
from boltmesh.advisor.prediction import NO_WORK, Collective, RankStep, predict_step
from boltmesh.plan.strategy_options import sharing_of
from boltmesh.planner.calibration import PredictedLayout
from boltmesh.planner.layout import Layout
from boltmesh.planner.step_time import NOT_DIVIDED
from boltmesh.strategies.cost_model.memory import MemoryEstimate, estimate_memory
from boltmesh.strategies.cost_model.model import (
    Activations,
    JobShape,
    ModelShape,
    OwnedExperts,
    ShardingLayout,
    StepWork,
    TensorShape,
    UnitShape,
)
from boltmesh.strategies.cost_model.step_time import Machine, estimate_step_time
from boltmesh.strategies.cost_model.traffic import OperatorBytes, estimate_traffic
from boltmesh.strategies.registry import STRATEGIES

if TYPE_CHECKING:
    from boltmesh.plan.mesh_plan import MeshPlan

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
    owned: OwnedExperts | None = None,
    exchanged: Sequence[Collective] = (),
    recomputed: StepWork = NO_WORK,
) -> PlannedLayout:
    """Return the memory and the time of a layout of whole models.

    Args:
        model: With the work of one batch.
        layout: By the name of its strategy.
        job: Ranks and batches of the layout.
        hardware: Devices and rates that the layout is for.
        scale: Rows of the layout's batch over those of the model's.
        owned: Experts that are divided over ranks.
        exchanged: Exchanges of their rows, and sums of their gradients over the copies.
        recomputed: Work of one batch that the backward pass repeats.
    """
    work = model.work
    assert work is not None
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
    rest, stepped = model, 0.0
    if owned is not None:
        rest, own = owned.split(model)
        stepped = own.trained_numel
    sharing = sharing_of(layout.name, STRATEGIES[layout.name], layout.arguments)
    shards = job.num_shards if sharing.stage else 1
    has_parameters = sharing.parameter_place == "device"
    outside = 1.0 if not has_parameters else layout.arguments.get("offload_fraction", 1.0)
    on_device = 1.0 - outside if sharing.has_engine else 1.0
    memory = estimate_memory(model, sharing, job, owned)
    step = RankStep(
        work=scaled(work, scale),
        recomputed=scaled(recomputed, scale),
        batches=layout.accumulate,
        sizes=layout.sizes,
        microbatches=1,
        bubble=0.0,
        traffic=(
            *(
                Collective("data", each.operator, each.calls, each.whole_bytes, _group(each, job))
                for each in estimate_traffic(rest, sharing, job)
            ),
            *exchanged,
        ),
        is_gathering=sharing.stage == 3,
        stepped_numel=on_device * rest.trained_numel / shards + stepped,
        stepped_tensors=sum(len(each.tensors) for each in model.units),
        state_copies=job.state_copies,
        **_seconds_outside(rest, sharing, job, hardware.machine),
    )
    return judged(layout, memory, hardware, step)


def plan_divided(
    plan: "MeshPlan",
    model: ModelShape,
    layout: ConfigLayout,
    job: JobShape,
    hardware: Hardware,
    *,
    scale: float,
    recomputed: StepWork,
) -> PlannedLayout:
    """Return the memory and the time of a layout that divides layers.

    Args:
        plan: Its memory and traffic.
        model: The whole one, with the work of one batch.
        layout: The layout that was planned.
        job: One rank, with the batches of the layout.
        hardware: Devices and rates that the layout is for.
        scale: Tokens of the layout's batch over those of the model's.
        recomputed: Work of one batch of the model that the backward pass repeats.
    """
    assert model.work is not None
    axes = layout.axes
    fullest = max(plan.places, key=lambda each: sum(dict(each.memory.peak.items()).values()))
    busiest = max(plan.places, key=lambda each: sum(one.payload_bytes for one in each.traffic))
    shards = axes.data * axes.context if plan.zero_stage else 1
    stepped = max(each.parameters for each in plan.places) / shards
    outside = axes.offload_fraction if axes.offload != "none" else 0.0
    step = RankStep(
        work=scaled(model.work, scale),
        recomputed=scaled(recomputed, scale),
        batches=layout.accumulate,
        sizes=layout.sizes,
        repeated=0.0 if axes.has_sequence_parallel else NOT_DIVIDED,
        microbatches=plan.num_microbatches,
        bubble=0.0 if plan.pipeline is None else plan.pipeline.bubble,
        traffic=tuple(
            Collective(each.axis, each.operator, each.calls, each.payload_bytes)
            for each in busiest.traffic
        ),
        is_gathering=plan.zero_stage == 3 and plan.pipeline is None,
        stepped_numel=(1 - outside) * stepped,
        stepped_tensors=sum(len(each.tensors) for each in model.units) // axes.pipeline,
        state_copies=job.state_copies,
        **_seconds_of_part(model, stepped, axes, job, hardware.machine),
    )
    return judged(layout, fullest.memory, hardware, step)


def _seconds_of_part(
    model: ModelShape, numel: float, axes: Layout, job: JobShape, machine: Machine
) -> dict[str, float]:
    """Return the seconds of the offload of a rank that updates ``numel`` elements."""
    unit = UnitShape("", (TensorShape("part", (ceil(numel),)),))
    part = replace(model, units=(unit,), forward_flops=None)
    name, given = replace(axes, pipeline=1, context=1, tensor=1, expert=1).strategy
    return _seconds_outside(part, sharing_of(name, STRATEGIES[name], given), job, machine)


def _seconds_outside(
    model: ModelShape, sharing: ShardingLayout, job: JobShape, machine: Machine
) -> dict[str, float]:
    """Return the seconds of transfers in each pass, and of the step outside of the device."""
    parts = estimate_step_time(model, sharing, job, machine)
    bus, host, disk = (each or 0.0 for each in (parts.bus_s, parts.host_s, parts.disk_s))
    if sharing.parameter_place == "device":
        return {"transfer_s": 0.0, "outside_s": max(host, disk, bus)}
    return {"transfer_s": bus, "outside_s": max(host, disk)}


def _group(moved: OperatorBytes, job: JobShape) -> int:
    """Return the ranks of a collective: those of a copy, or its copies for an all-reduce."""
    copies = job.num_ranks // job.num_shards
    if moved.operator != "all-reduce":
        return job.num_shards
    return copies if copies > 1 else job.num_ranks


def judged(
    layout: ConfigLayout, memory: MemoryEstimate, hardware: Hardware, step: RankStep
) -> PlannedLayout:
    """Return a layout with its predicted time, corrected by measured ones, and whether it fits."""
    machine, time = hardware.machine, predict_step(step, hardware)
    factor = hardware.correction.factor(described(layout, step, time.terms()))
    sizes = [
        (amount, room)
        for place, amount in memory.peak.items()
        if (room := machine.size_of(place)) is not None
    ]
    return PlannedLayout(
        layout,
        time.scaled(factor).terms(),
        memory,
        machine.places_too_small_for(memory.peak),
        is_tight=any(amount > TIGHT * room for amount, room in sizes),
        step=step,
    )


def described(layout: ConfigLayout, step: RankStep, time: Mapping[str, float]) -> PredictedLayout:
    """Return the properties on which the error of a layout's predicted time depends."""
    axes, work = layout.axes, step.work
    sizes = (
        max(1, work.flops), max(1, work.operators), axes.data, axes.tensor, axes.pipeline,
        axes.context, step.batches * step.microbatches,
    )  # fmt: skip
    return PredictedLayout.of(HERE, time, "bf16", sizes, (axes.zero, axes.recompute, axes.offload))


def order(planned: PlannedLayout) -> tuple[bool, bool, float]:
    """Return a key that sorts layouts: those that fit, those with room, the fastest first."""
    seconds = planned.seconds * (1 + EASE * planned.layout.axes.num_mechanisms)
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


def repeated(model: ModelShape, again: ModelShape, part: float) -> tuple[ModelShape, StepWork]:
    """Return the model with a part of its blocks recomputed, and the work that is repeated.

    Args:
        model: With no block recomputed.
        again: With all of them.
        part: Share of the blocks.
    """
    assert model.activations is not None
    assert again.activations is not None
    assert model.work is not None
    assert again.work is not None
    before, after = model.work, again.work
    saved = (1 - part) * model.activations.saved_bytes + part * again.activations.saved_bytes
    blocks = max(1, sum(1 for each in model.units if each.name))
    one_block = (model.activations.saved_bytes - again.activations.saved_bytes) // blocks
    kept = replace(
        again.activations,
        saved_bytes=ceil(saved),
        transient_bytes=again.activations.transient_bytes + one_block,
    )
    more = {shape: count - before.products.get(shape, 0) for shape, count in after.products.items()}
    work = StepWork(
        after.flops - before.flops,
        after.moved_bytes - before.moved_bytes,
        after.operators - before.operators,
        more,
        after.product_bytes - before.product_bytes,
    )
    work = replace(scaled(work, part), operators=ceil(part * work.operators))
    return replace(model, activations=kept), work
