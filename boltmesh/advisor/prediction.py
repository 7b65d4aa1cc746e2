"""Predicts the time of a step of a config's own model, from counts of its dry run.

Work is what the operators of a step compute and move, traffic what the strategy itself says of its
collectives. A CPU runs operators and collectives one after the other; a GPU launches them beside
its products and hides a part of the data axis's traffic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from boltmesh.planner.step_time import NOT_DIVIDED, OVERLAP
from boltmesh.strategies.cost_model.model import StepWork
from boltmesh.strategies.cost_model.step_time import Machine

BUCKET_BYTES = 25 * 2**20
"""Bytes of an all-reduce of which the number is not known, as of DDP."""
OPTIMIZER_TENSORS = 3
"""Value and gradient read, value written; beside them the state, read and written."""
OPTIMIZER_OPERATORS = 12
"""Operators of Adam for each tensor, where it steps them one by one, as on a CPU."""

ALL_REDUCES = ("allreduce", "all-reduce")

TERMS = {
    "compute": "forward and backward passes",
    "bubble": "pipeline bubble",
    "pipeline": "messages between stages",
    "tensor": "collectives of the tensor axis",
    "context": "collectives of the context axis",
    "data": "collectives of the data axis not hidden",
    "optimizer": "optimizer step",
    "offload": "host and disk not hidden",
    "fixed": "fixed",
}


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in an optimizer step of one rank."""

    axis: str
    operator: str
    calls: float | None
    payload_bytes: float
    size: int | None = None
    """Ranks of a group that is a part of the axis: neighbours, or copies for an all-reduce."""


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
        stepped_numel: Elements that a rank updates on its device.
        stepped_tensors: Tensors that it updates.
        state_copies: Tensors of state for each.
        offload_s: Time of transfers and of the step on the host.
        devices_per_node: Ranks that the faster link joins.
    """

    work: StepWork
    batches: int
    sizes: Mapping[str, int]
    microbatches: int
    bubble: float
    traffic: tuple[Collective, ...]
    stepped_numel: float
    stepped_tensors: int
    state_copies: int
    offload_s: float
    devices_per_node: int


def predict_step(step: RankStep, machine: Machine, *, is_cpu: bool) -> dict[str, float]:
    """Return the seconds of each part of a step; the parts exclude each other."""
    assert machine.device_tflops is not None
    assert machine.memory_gb_s is not None
    pipeline, tensor = step.sizes.get("pipeline", 1), step.sizes.get("tensor", 1)
    repeated = NOT_DIVIDED + (1 - NOT_DIVIDED) / tensor
    kernels = (
        step.work.flops / tensor / (machine.device_tflops * 1e12)
        + step.work.moved_bytes * repeated / (machine.memory_gb_s * 1e9)
    ) / (pipeline * step.sizes.get("context", 1))
    operator = (machine.operator_us or 0.0) * 1e-6
    launches = operator * step.work.operators * step.microbatches / pipeline
    passes = kernels + launches if is_cpu else max(kernels, launches)
    compute = step.batches * passes
    found = dict.fromkeys(TERMS, 0.0)
    found["compute"] = compute
    found["bubble"] = compute * _waiting(step.bubble, machine.ranks_per_core or 1.0)
    for axis in ("pipeline", "data", "tensor", "context"):
        moved = [each for each in step.traffic if each.axis == axis]
        found[axis] = sum(_seconds(each, step, machine) for each in moved)
    if not is_cpu:
        found["data"] -= OVERLAP * min(found["data"], 2 / 3 * compute)
    copies = OPTIMIZER_TENSORS + 2 * step.state_copies
    found["optimizer"] = step.stepped_numel * 4 * copies / (machine.memory_gb_s * 1e9)
    if is_cpu:
        found["optimizer"] += operator * OPTIMIZER_OPERATORS * step.stepped_tensors
    found["offload"] = max(0.0, step.offload_s - 2 / 3 * compute)  # beside the backward pass
    found["fixed"] = (machine.step_ms or 0.0) * 1e-3
    return {name: value * (machine.calibration or 1.0) for name, value in found.items()}


def _waiting(bubble: float, ranks_per_core: float) -> float:
    """Return the time that a pipeline's ranks wait, over the time in which they compute.

    Rates are those of ranks that compute all at once. Where they share cores, those that compute
    while others wait are faster: cores idle only where fewer ranks compute than there are cores.
    """
    return max(0.0, 1 / ((1 - bubble) * ranks_per_core) - 1)


def _seconds(each: Collective, step: RankStep, machine: Machine) -> float:
    """Return the time of collectives: their latency, and what a rank sends."""
    size = each.size or step.sizes.get(each.axis, 1)
    if size == 1 or each.operator == "recv":
        return 0.0
    measured = _measured(each, size, machine)
    if measured is not None:
        return measured
    sent, reach = each.payload_bytes, step.sizes.get(each.axis, 1)
    if each.operator != "send":
        is_all_reduce = each.operator in ALL_REDUCES
        sent *= (size - 1) / size * (2 if is_all_reduce else 1)
        if not is_all_reduce:
            reach = size
    calls = _calls(each)
    inner = 1
    for axis in ("tensor", "context", "data", "pipeline"):
        if axis == each.axis:
            break
        inner *= step.sizes.get(axis, 1)
    is_inside = inner * reach <= step.devices_per_node
    rate = machine.link_gb_s if is_inside and machine.link_gb_s else machine.network_gb_s
    latency = (machine.collective_us or 0.0) * 1e-6
    return calls * latency + (sent / (rate * 1e9) if rate else 0.0)


def _calls(each: Collective) -> float:
    return ceil(each.payload_bytes / BUCKET_BYTES) if each.calls is None else each.calls


def _measured(each: Collective, size: int, machine: Machine) -> float | None:
    """Return the time of collectives from all-reduces of such groups; None without them.

    A gather or a scatter moves half of what an all-reduce does, with as many messages.
    """
    calls = _calls(each)
    if each.operator == "send" or not calls:
        return None
    seconds = machine.allreduce_seconds(size, each.payload_bytes / calls)
    least = machine.allreduce_seconds(size, 0)
    if seconds is None or least is None:
        return None
    if each.operator in ALL_REDUCES:
        return calls * seconds
    return calls * (least + (seconds - least) / 2)
