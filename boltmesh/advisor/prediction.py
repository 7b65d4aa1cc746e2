"""The step of a config's own model in seconds, from counts of its dry run.

Work is what the operators of a step compute and move, traffic what the strategy itself says of its
collectives. What follows from their seconds, and how a cluster moves and multiplies, is
``planner/step_time.py``'s, as for plans by sizes. A CPU runs operators and collectives one after
the other; a GPU launches them beside its products.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from boltmesh.advisor.machine import Hardware
from boltmesh.axes import ALL_AXES, AXES
from boltmesh.planner.layout import AxisGroup
from boltmesh.planner.links import ClusterLinks
from boltmesh.planner.rates import default_rates
from boltmesh.planner.step_time import (
    NOT_DIVIDED,
    OVERLAP,
    Passes,
    PredictedStepTime,
    RankSeconds,
    factor_of,
    product_time,
)
from boltmesh.strategies.cost_model.model import StepWork

BUCKET_BYTES = 25 * 2**20
"""Bytes of an all-reduce if their number is not known, as with DDP."""
OPTIMIZER_TENSORS = 3
"""Value and gradient read, value written; beside them the state, read and written."""
OPTIMIZER_OPERATORS = 12
"""Operators of Adam for each tensor, where it steps them one by one, as on a CPU."""
EXCHANGES = ("all-to-all", "alltoall_base")
ALL_REDUCES = ("allreduce", "all-reduce")
NO_WORK = StepWork(0, 0, 0)
FORWARD = 1 / 3
"""Part of the work of a step that is its forward pass."""


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in an optimizer step of one rank."""

    axis: str
    operator: str
    calls: float | None
    payload_bytes: float
    size: int | None = None
    """Ranks of a group that is a part of the axis: neighbours, or copies for an all-reduce."""

    @property
    def num_calls(self) -> float:
        """Calls in a step."""
        return ceil(self.payload_bytes / BUCKET_BYTES) if self.calls is None else self.calls


@dataclass(frozen=True)
class RankStep:
    """Work and traffic of the ranks of a layout in an optimizer step.

    Attributes:
        work: One batch of a replica on a single rank.
        batches: Batches of a replica in an optimizer step.
        sizes: Ranks of the axes; of those that are left out one.
        microbatches: Parts of a batch; 1 without a pipeline.
        bubble: Idle share of the pipeline's ranks.
        traffic: Collectives of the busiest rank.
        is_gathering: The data axis gathers and reduces in each pass, as ZeRO-3 does.
        stepped_numel: Elements that a rank updates on its device.
        stepped_tensors: Tensors that it updates.
        state_copies: Tensors of state for each.
        repeated: Part of the operators' traffic that each rank of the tensor axis has in full.
        transfer_s: Time in which parameters and gradients go from and to the host in each pass.
        recomputed: Part of the forward pass that the backward pass repeats; ``work`` has it once.
        outside_s: Time of the step on the host or the disk, which begins when gradients are there.
    """

    work: StepWork
    batches: int
    sizes: Mapping[str, int]
    microbatches: int
    bubble: float
    traffic: tuple[Collective, ...]
    is_gathering: bool
    stepped_numel: float
    stepped_tensors: int
    state_copies: int
    repeated: float = NOT_DIVIDED
    transfer_s: float = 0.0
    outside_s: float = 0.0
    recomputed: StepWork = NO_WORK


def predict_step(step: RankStep, hardware: Hardware) -> PredictedStepTime:
    """Return the time of a step."""
    machine, is_cpu = hardware.machine, hardware.is_cpu
    assert machine.memory_gb_s is not None
    operator = (machine.operator_us or 0.0) * 1e-6
    compute, recompute = (_passes(work, step, hardware) for work in (step.work, step.recomputed))
    spent = dict.fromkeys(ALL_AXES, 0.0)
    for each in step.traffic:
        spent[each.axis] = spent.get(each.axis, 0.0) + _seconds(each, step, hardware)
    optimizer = step.stepped_numel * 4 * (OPTIMIZER_TENSORS + 2 * step.state_copies)
    optimizer /= machine.memory_gb_s * 1e9
    if is_cpu:
        optimizer += operator * OPTIMIZER_OPERATORS * step.stepped_tensors
    waiting = (compute + recompute) * _waiting(step.bubble, machine.ranks_per_core or 1.0)
    passes = Passes(
        forward=FORWARD * compute,
        backward=(1 - FORWARD) * compute,
        recompute=recompute,
        tensor=spent["tensor"],
        context=spent["context"],
        expert=spent["expert"],
    )
    found = RankSeconds(
        passes,
        gather=spent["data"] if step.is_gathering else 0.0,
        transfer=step.transfer_s,
        reduction=0.0 if step.is_gathering else spent["data"],
        bubble=waiting + spent["pipeline"],
        optimizer=max(optimizer, step.outside_s),
        fixed=(machine.step_ms or 0.0) * 1e-3,
        microbatches=step.batches * step.microbatches,
    )
    factor = 1.0
    if hardware.cluster is not None:
        factor = factor_of(hardware.cluster, default_rates())
    return found.predicted(overlap=0.0 if is_cpu else OVERLAP, factor=factor)


def _passes(work: StepWork, step: RankStep, hardware: Hardware) -> float:
    """Return the seconds of a rank's part of some work on each of its batches."""
    operator = (hardware.machine.operator_us or 0.0) * 1e-6
    launches = operator * work.operators * step.microbatches / step.sizes.get("pipeline", 1)
    kernels = _kernels(work, step, hardware)
    return step.batches * (kernels + launches if hardware.is_cpu else max(kernels, launches))


def _kernels(work: StepWork, step: RankStep, hardware: Hardware) -> float:
    """Return the seconds of operators of a batch on a rank, whatever launches them."""
    machine = hardware.machine
    assert machine.device_tflops is not None
    assert machine.memory_gb_s is not None
    tensor = step.sizes.get("tensor", 1)
    rate, memory = machine.device_tflops * 1e12, machine.memory_gb_s * 1e9
    moved = work.moved_bytes
    if hardware.cluster is None:
        products = work.flops / rate
    else:
        moved -= work.product_bytes
        units = hardware.cluster.accelerator.units
        counted = sum(2.0 * rows * k * n * count for (rows, k, n), count in work.products.items())
        products = max(0.0, work.flops - counted) / rate + sum(
            count * product_time(rows, k, n, rate, units, memory)
            for (rows, k, n), count in work.products.items()
        )
    repeated = step.repeated + (1 - step.repeated) / tensor
    divided = step.sizes.get("pipeline", 1) * step.sizes.get("context", 1)
    return (products / tensor + moved * repeated / memory) / divided


def _waiting(bubble: float, ranks_per_core: float) -> float:
    """Return the time that a pipeline's ranks wait, over the time in which they compute.

    Rates are those of ranks that compute all at once. Where they share cores, those that compute
    while others wait are faster: cores idle only where fewer ranks compute than there are cores.
    """
    return max(0.0, 1 / ((1 - bubble) * ranks_per_core) - 1)


def _seconds(each: Collective, step: RankStep, hardware: Hardware) -> float:
    """Return the time of collectives of one kind."""
    size, calls = each.size or step.sizes.get(each.axis, 1), each.num_calls
    if size == 1 or each.operator == "recv" or not calls:
        return 0.0
    num_bytes = each.payload_bytes / calls
    if hardware.cluster is None:
        return calls * _measured(each.operator, size, num_bytes, hardware)
    reach = step.sizes.get(each.axis, 1)
    if each.operator not in {*ALL_REDUCES, "send"}:
        reach = size
    inner = 1
    for axis in reversed(AXES):
        if axis == each.axis:
            break
        inner *= step.sizes.get(axis, 1)
    else:
        inner = 1  # neighbours, whatever axis they are of
    inner *= max(1, reach // size)  # copies lie apart by the ranks of one of them
    in_node = min(size, max(1, hardware.ranks_per_node // inner))
    links, group = ClusterLinks(hardware.cluster, default_rates()), AxisGroup(size, in_node)
    if each.operator == "send":
        return calls * links.message(group, num_bytes)
    if each.operator in EXCHANGES:
        return calls * links.exchange(group, num_bytes / size)
    if each.operator in ALL_REDUCES:
        return calls * links.all_reduce(group, num_bytes)
    return calls * links.ring(group, num_bytes)


def _measured(operator: str, size: int, num_bytes: float, hardware: Hardware) -> float:
    """Return the time of one call, from all-reduces of such groups or from a rate and a latency.

    A gather or a scatter moves half of what an all-reduce does, with as many messages.
    """
    machine = hardware.machine
    seconds, least = (machine.allreduce_seconds(size, each) for each in (num_bytes, 0))
    if operator != "send" and seconds is not None and least is not None:
        return seconds if operator in ALL_REDUCES else least + (seconds - least) / 2
    sent = num_bytes
    if operator != "send":
        sent *= (size - 1) / size * (2 if operator in ALL_REDUCES else 1)
    latency = (machine.collective_us or 0.0) * 1e-6
    rate = machine.network_gb_s
    if machine.link_gb_s and size <= hardware.ranks_per_node:
        rate = machine.link_gb_s
    return latency + (sent / (rate * 1e9) if rate else 0.0)
