"""The demo's GPT and its devices: memory, FLOPs and tensor plan by the usual formulas.

Readings of NVML and psutil are made for the host of the first rank.
"""

import functools
import math
from math import prod
from typing import NamedTuple

from boltmesh.telemetry.snapshot import ExpertLoad, Memory, MemoryKind, OffloadTotal
from boltmesh.telemetry.tensor_plan import WHOLE, PlannedBlocks, PlannedParameters, TensorPlanTable
from boltmesh.tui.demo.setup import (
    GPUS_PER_HOST,
    HEAD_WIDTH,
    TOKENS_PER_SAMPLE,
    VOCABULARY,
    WIDTH,
    Setup,
    normal,
    uniform,
)
from boltmesh.tui.devices import DeviceReading, GpuProcess

GIB = 2**30
PEAK_FLOPS_PER_SECOND = 989e12
"""An H100 SXM in bfloat16 without sparsity."""
CONTEXT_BYTES = int(1.3 * GIB)
"""The driver's context and NCCL's buffers, which torch's allocator does not know of."""
BUCKET_BYTES = 25 * 2**20

_ON_HOST, _ON_DISK = 3 / 8, 1 / 8
"""Shares of the parameters whose optimizer state is kept there; the rest stays on the device."""
_STATE_BYTES = 12
"""Per parameter that is stepped elsewhere: itself and two moments, in float32."""
_STEPS_BEFORE_A_MEDIAN = 4


def parameters(setup: Setup, stage: int) -> int:
    """Return how many parameters one rank of a stage holds.

    Norms, and the biases behind a sum over the tensor axis, are not split.
    """
    layer = (12 * WIDTH * WIDTH + 7 * WIDTH) // setup.tensor + 6 * WIDTH
    total = setup.layers(stage) * layer
    if stage == 0:
        total += VOCABULARY * WIDTH // setup.tensor + TOKENS_PER_SAMPLE * WIDTH
    if stage == setup.pipeline - 1:
        total += VOCABULARY * WIDTH // setup.tensor + 2 * WIDTH
    return total


def gradient_bytes(setup: Setup, stage: int) -> int:
    """Return the float32 gradients of one rank of a stage."""
    return 4 * parameters(setup, stage)


def num_buckets(setup: Setup, stage: int) -> int:
    """Return how many all-reduces DDP cuts the gradients into."""
    return math.ceil(gradient_bytes(setup, stage) / BUCKET_BYTES)


def activation_bytes(setup: Setup) -> int:
    """Return one microbatch between two layers, in bfloat16."""
    return 2 * setup.microbatch_size * TOKENS_PER_SAMPLE * WIDTH


NUM_EXPERTS = 16
CHOICES = 2
CAPACITY = 2.0
"""Rows of an expert over the mean; further rows are dropped."""
_RECENT_STEPS = 5


def expert_loads(setup: Setup, rank: int, step: int) -> tuple[ExpertLoad, ...]:
    """Return the rows that one rank has sent to the experts of each layer."""
    if setup.scenario != "experts":
        return ()
    each = CHOICES * setup.tokens_per_step // setup.context
    loads = []
    for layer in range(setup.num_layers):
        liked = [math.exp(0.35 * normal(setup.seed, 30, layer, e)) for e in range(NUM_EXPERTS)]
        shares = [value / sum(liked) for value in liked]
        now = [1 + 0.03 * normal(setup.seed, 31, step, rank, e) for e in range(NUM_EXPERTS)]
        excess = sum(max(0.0, share - CAPACITY / NUM_EXPERTS) for share in shares)
        loads.append(
            ExpertLoad(
                f"blocks.{layer}.moe.experts",
                tuple(int(step * each * share) for share in shares),
                tuple(int(_RECENT_STEPS * each * s * n) for s, n in zip(shares, now, strict=True)),
                dropped=int(step * each * excess),
            )
        )
    return tuple(loads)


def flops_per_batch(setup: Setup, stage: int) -> float:
    """Return the FLOPs of one step on one rank, forward and backward, the lookup left out.

    Source: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, appendix A.
    """
    layer = 72 * WIDTH * WIDTH + 12 * TOKENS_PER_SAMPLE * WIDTH
    per_token = setup.layers(stage) * layer
    if stage == setup.pipeline - 1:
        per_token += 6 * WIDTH * VOCABULARY
    return float(per_token * setup.tokens_per_step // (setup.tensor * setup.context))


def _saved_activation_bytes(setup: Setup, stage: int) -> int:
    """Return the activations kept for the backward: microbatches in flight, no attention matrix.

    Source: Korthikanti et al. 2022, table 2, tensor parallelism with selective recomputation.
    """
    in_flight = min(setup.num_microbatches, setup.pipeline - stage)
    tokens = setup.microbatch_size * TOKENS_PER_SAMPLE // setup.context
    total = in_flight * setup.layers(stage) * tokens * WIDTH * (10 + 24 // setup.tensor)
    if stage == setup.pipeline - 1:
        total += 3 * 4 * tokens * VOCABULARY // setup.tensor
    return total


def memory_kinds(setup: Setup, rank: int) -> tuple[MemoryKind, ...]:
    """Return the rank's memory by kind; the activations are a little more than predicted."""
    place = setup.place(rank)
    stage = place["pipeline"]
    size = parameters(setup, stage)
    activations = _saved_activation_bytes(setup, stage)
    grown = int(activations * (1.03 + 0.004 * ((place["data"] + place["tensor"]) % 4)))
    on_device = int(8 * size * (1 - _ON_HOST - _ON_DISK))
    on_host, on_disk = (int(_STATE_BYTES * size * share) for share in (_ON_HOST, _ON_DISK))
    kept = 8 * size + on_device + grown
    return (
        MemoryKind("parameters", "device", 4 * size, 4 * size),
        MemoryKind("gradients", "device", 4 * size, 4 * size),
        MemoryKind("optimizer", "device", on_device, on_device),
        MemoryKind("optimizer", "host", on_host, on_host),
        MemoryKind("optimizer", "disk", on_disk, on_disk),
        MemoryKind("activations", "device", grown, activations),
        MemoryKind("cache", "device", kept // 24, None),
        MemoryKind("other", "device", CONTEXT_BYTES, None),
        MemoryKind("other", "host", host_bytes(rank), None),
    )


def offload(setup: Setup, rank: int, step: int) -> tuple[OffloadTotal, ...]:
    """Return the bytes to and from the host and the disk, by the formulas of ZeRO-Offload.

    Gradients of the parameters that are stepped on the host come, parameters go, in float32. All
    state on the disk is read and written; the ranks of a host share its disks.
    """
    stage = setup.place(rank)["pipeline"]
    size = parameters(setup, stage)
    gradients = 4 * size * (_ON_HOST + _ON_DISK)
    state = _STATE_BYTES * size * _ON_DISK
    disks = GPUS_PER_HOST / min(setup.world_size, GPUS_PER_HOST)
    ways = (
        ("host", "read", gradients, 21.3e9),
        ("host", "write", gradients, 20.8e9),
        ("disk", "read", state, 9.6e9 * disks),
        ("disk", "write", state, 7.4e9 * disks),
    )
    found = []
    for number, (place, direction, moved, bandwidth) in enumerate(ways):
        steady = bandwidth * (1 + 0.02 * normal(setup.seed, 11, rank, number))
        is_known = step >= _STEPS_BEFORE_A_MEDIAN
        found.append(
            OffloadTotal(
                place=place,  # type: ignore[arg-type]
                direction=direction,  # type: ignore[arg-type]
                calls=num_buckets(setup, stage) * step,
                moved_bytes=int(moved) * step,
                bytes_per_step=float(int(moved)) if is_known else None,
                seconds_per_step=moved / steady if is_known else None,
                bytes_per_second=steady if step else None,
            )
        )
    return tuple(found) if step else ()


def host_bytes(rank: int) -> int:
    """Return the host memory of a rank's process without offloaded state."""
    return int(3.1 * GIB) + rank % 16 * 2**20


def memory(kinds: tuple[MemoryKind, ...]) -> Memory:
    """Return the bytes of torch's allocator after a step, when no activations are left."""
    used = {kind.kind: kind.measured_bytes or 0 for kind in kinds if kind.place == "device"}
    kept = used["parameters"] + used["gradients"] + used["optimizer"]
    peak = kept + used["activations"]
    return Memory(
        host_rss_bytes=sum(kind.measured_bytes or 0 for kind in kinds if kind.place == "host"),
        device_allocated_bytes=kept,
        device_reserved_bytes=peak + used["cache"],
        device_peak_bytes=peak,
    )


_HEADS = WIDTH // HEAD_WIDTH
_HIDDEN = 4 * WIDTH
_PARAMETER_BYTES = 4
_NORM = "layer_norm in blocks.*.norm_1 needs it whole"
_TABLE = f"{_NORM}; a table of 0.1% of the model is not worth a sum"
_TOGETHER = "parts that nothing needs together"
_FROM_HEADS = f"{_HEADS} {_TOGETHER} before blocks.*.attention.out.weight sums over them"
_FROM_HIDDEN = f"{_HIDDEN} {_TOGETHER} before blocks.*.down.weight sums over them"
_TOKENS = f"{VOCABULARY} tokens, of which only sums are needed"
_NOTE = (
    "the plan that ships with the model leaves head.weight whole; here it is divided by tokens, "
    "for the loss needs only sums over them"
)
_LOOKUP = "a lookup: sum forward; a loss: maximum and sums forward, sum backward"


@functools.lru_cache(maxsize=8)
def tensor_plan(setup: Setup) -> TensorPlanTable | None:
    """Return the plan; None where the tensor axis has one rank."""
    if setup.tensor == 1:
        return None
    layers, vocabulary, heads = setup.num_layers, f"{VOCABULARY}x1", f"{_HEADS}x{HEAD_WIDTH}"
    qkv = f"column of dim 0: 3x{heads}"
    up = f"column of dim 0: {_HIDDEN}x1"

    def divided(
        pattern: str, count: int, shape: tuple[int, ...], style: str, why: str, asked: str = ""
    ) -> PlannedParameters:
        whole = count * prod(shape) * _PARAMETER_BYTES
        kept = whole if style == WHOLE else whole // setup.tensor
        return PlannedParameters(pattern, count, shape, style, why, kept, whole, asked)

    def in_layers(
        name: str, shape: tuple[int, ...], style: str, why: str, asked: str = ""
    ) -> PlannedParameters:
        return divided(f"blocks.*.{name}", layers, shape, style, why, asked)

    token_style = f"vocabulary of dim 0: {vocabulary}"
    rows = (
        divided("tokens.weight", 1, (VOCABULARY, WIDTH), token_style, _TOKENS, _LOOKUP),
        in_layers("attention.qkv.weight", (3 * WIDTH, WIDTH), qkv, _FROM_HEADS, "sum backward"),
        in_layers("attention.qkv.bias", (3 * WIDTH,), qkv, _FROM_HEADS),
        in_layers(
            "attention.out.weight",
            (WIDTH, WIDTH),
            f"row of dim 1: {heads}",
            f"sums over {_HEADS} {_TOGETHER}",
            "sum forward",
        ),
        in_layers("up.weight", (_HIDDEN, WIDTH), up, _FROM_HIDDEN, "sum backward"),
        in_layers("up.bias", (_HIDDEN,), up, _FROM_HIDDEN),
        in_layers(
            "down.weight",
            (WIDTH, _HIDDEN),
            f"row of dim 1: {_HIDDEN}x1",
            f"sums over {_HIDDEN} {_TOGETHER}",
            "sum forward",
        ),
        divided("head.weight", 1, (VOCABULARY, WIDTH), token_style, _TOKENS, _LOOKUP),
        divided("positions.weight", 1, (TOKENS_PER_SAMPLE, WIDTH), WHOLE, _TABLE),
        *(
            in_layers(name, (WIDTH,), WHOLE, _NORM)
            for name in (
                "norm_1.weight",
                "norm_1.bias",
                "norm_2.weight",
                "norm_2.bias",
                "attention.out.bias",
                "down.bias",
            )
        ),
        divided("norm.weight", 1, (WIDTH,), WHOLE, _NORM),
        divided("norm.bias", 1, (WIDTH,), WHOLE, _NORM),
    )
    return TensorPlanTable(
        setup.tensor,
        rows,
        blocks=(PlannedBlocks("blocks.0", layers, "local"), PlannedBlocks("", 1, "local")),
        notes=(_NOTE,),
    )


NAME = "NVIDIA H100 80GB HBM3"
POWER_LIMIT_WATTS = 700.0
_TOTAL_BYTES = int(79.6 * GIB)
_MAX_MHZ = 1980
FIRST_PID = 41_230


def uuid(rank: int) -> str:
    """Return the UUID of the rank's GPU, as NVML spells it."""
    return f"GPU-00000000-0000-0000-0000-{rank:012x}"


def device_readings(setup: Setup, second: int, *, is_hung: bool) -> tuple[DeviceReading, ...]:
    """Return the readings of one second of a job that runs: GPUs, processes and the host."""
    ranks = range(min(setup.world_size, GPUS_PER_HOST))
    gpus = [_gpu(setup, rank, second, is_hung=is_hung) for rank in ranks]
    processes = [_process(setup, rank, second) for rank in ranks]
    return (*gpus, *processes, _host(setup, tuple(ranks), second))


class GpuLoad(NamedTuple):
    """Load of a GPU in one second."""

    percent: float
    watts: float
    celsius: float


@functools.lru_cache(maxsize=2048)
def gpu_load(setup: Setup, rank: int, second: int, *, is_hung: bool = False) -> GpuLoad:
    """Return the load of the rank's GPU."""
    noise = functools.partial(normal, setup.seed, 7, second, rank)
    is_victim = rank == setup.victim
    is_hot = is_victim and setup.scenario == "straggler"
    # A kernel of NCCL that waits keeps the GPU in use, and cold.
    busy = 100.0 if is_hung else 61.0 if setup.scenario == "input_bound" else 96.5
    busy = min(100.0, busy + (0.0 if is_hung else 1.5 * noise(1)))
    power = (228.0 if is_hung else 415.0 if setup.scenario == "input_bound" else 618.0) + 9 * noise(
        2
    )
    if is_hung and is_victim:
        busy, power = 0.0, 121.0
    celsius = 89 if is_hot else (43 if power < 300 else 61) + rank % 4 + 0.7 * noise(3)
    watts = 452 + 6 * noise(2) if is_hot else power
    return GpuLoad(float(round(busy)), float(round(watts)), float(round(celsius)))


def _gpu(setup: Setup, rank: int, second: int, *, is_hung: bool) -> DeviceReading:
    noise = functools.partial(normal, setup.seed, 7, second, rank)
    is_hot = rank == setup.victim and setup.scenario == "straggler"
    load = gpu_load(setup, rank, second, is_hung=is_hung)
    busy, is_calm = load.percent, load.watts < 300
    reserved = memory(memory_kinds(setup, rank)).device_reserved_bytes or 0
    used = reserved + CONTEXT_BYTES
    moving = not is_hung
    return DeviceReading(
        kind="gpu",
        ranks=(rank,),
        name=NAME,
        uuid=uuid(rank),
        utilization_percent=busy,
        memory_used_bytes=used,
        memory_total_bytes=_TOTAL_BYTES,
        power_watts=load.watts,
        temperature_celsius=load.celsius,
        memory_utilization_percent=float(round(0.45 * busy)) if moving else 0.0,
        sm_active_percent=round(0.86 * busy, 1) if moving else 0.0,
        sm_occupancy_percent=round(0.21 * busy, 1) if moving else 0.0,
        tensor_active_percent=round(0.41 * busy, 1) if moving else 0.0,
        memory_bandwidth_percent=round(0.34 * busy, 1) if moving else 0.0,
        power_limit_watts=POWER_LIMIT_WATTS,
        temperature_limit_celsius=87.0,
        sm_clock_mhz=1320 if is_hot else _MAX_MHZ if is_calm else 1755,
        sm_clock_max_mhz=_MAX_MHZ,
        memory_clock_mhz=2619,
        memory_clock_max_mhz=2619,
        throttle_reasons=("HW thermal",) if is_hot else () if busy else ("idle",),
        nvlink_sent_bytes_per_second=21.4e9 * (1 + 0.03 * noise(4)) if moving else 0.0,
        nvlink_received_bytes_per_second=21.3e9 * (1 + 0.03 * noise(5)) if moving else 0.0,
        pcie_sent_bytes_per_second=31e6 * (1 + 0.2 * uniform(second, rank, 1)) if moving else 0.0,
        pcie_received_bytes_per_second=(
            84e6 * (1 + 0.2 * uniform(second, rank, 2)) if moving else 0.0
        ),
        ecc_corrected_errors=0,
        ecc_uncorrected_errors=0,
        processes=(GpuProcess(FIRST_PID + rank, used),),
    )


def _process(setup: Setup, rank: int, second: int) -> DeviceReading:
    kinds = memory_kinds(setup, rank)
    share = uniform(setup.seed, 8, second, rank)
    return DeviceReading(
        kind="process",
        ranks=(rank,),
        name=setup.host(rank),
        pid=FIRST_PID + rank,
        utilization_percent=round(101 + 6 * share, 1),
        memory_used_bytes=memory(kinds).host_rss_bytes,
        memory_total_bytes=2015 * GIB,
        shared_memory_bytes=int(0.9 * GIB),
        num_threads=118,
        disk_read_bytes_per_second=2.1e6 * share,
        disk_written_bytes_per_second=4096.0,
    )


def _host(setup: Setup, ranks: tuple[int, ...], second: int) -> DeviceReading:
    busy = 5.1 + 0.4 * normal(setup.seed, 9, second)
    return DeviceReading(
        kind="host",
        ranks=ranks,
        name=setup.host(0),
        utilization_percent=round(100.0 if setup.scenario == "input_bound" else busy, 1),
        memory_used_bytes=160 * GIB,
        memory_total_bytes=2015 * GIB,
        swap_used_bytes=0,
        swap_total_bytes=8 * GIB,
        num_cores=192,
        disk_folder="/tmp/boltmesh-1000",  # noqa: S108 (a name to show)
        disk_free_bytes=1402 * GIB,
        disk_total_bytes=1788 * GIB,
    )
