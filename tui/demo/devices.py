"""What NVML and psutil would say of the simulated job, on the host of its first rank."""

import functools

from boltmesh.tui.demo.model import CONTEXT_BYTES, GIB, memory, memory_kinds
from boltmesh.tui.demo.setup import GPUS_PER_HOST, Setup, normal, uniform
from boltmesh.tui.devices import DeviceReading, GpuProcess

NAME = "NVIDIA H100 80GB HBM3"
POWER_LIMIT_WATTS = 700.0
_TOTAL_BYTES = int(79.6 * GIB)
_MAX_MHZ = 1980
FIRST_PID = 41_230


def uuid(rank: int) -> str:
    """Return the UUID of the rank's GPU, as NVML spells it."""
    return f"GPU-00000000-0000-0000-0000-{rank:012x}"


def device_readings(
    setup: Setup, second: int, *, is_alive: bool, is_hung: bool
) -> tuple[DeviceReading, ...]:
    """Return the readings of one second: GPUs, processes while they live, and the host."""
    ranks = range(min(setup.world_size, GPUS_PER_HOST))
    gpus = [_gpu(setup, rank, second, is_alive=is_alive, is_hung=is_hung) for rank in ranks]
    processes = [_process(setup, rank, second) for rank in ranks] if is_alive else []
    return (*gpus, *processes, _host(setup, tuple(ranks), second))


def _gpu(setup: Setup, rank: int, second: int, *, is_alive: bool, is_hung: bool) -> DeviceReading:
    noise = functools.partial(normal, setup.seed, 7, second, rank)
    is_victim = rank == setup.victim
    is_hot = is_alive and is_victim and setup.scenario == "straggler"
    # A kernel of NCCL that waits keeps the GPU in use, and cold.
    busy = 100.0 if is_hung else 61.0 if setup.scenario == "input_bound" else 96.5
    busy = min(100.0, busy + (0.0 if is_hung else 1.5 * noise(1)))
    power = (228.0 if is_hung else 415.0 if setup.scenario == "input_bound" else 618.0) + 9 * noise(
        2
    )
    if not is_alive or (is_hung and is_victim):
        busy, power = 0.0, 121.0
    is_calm = power < 300
    reserved = memory(memory_kinds(setup, rank)).device_reserved_bytes or 0
    used = reserved + CONTEXT_BYTES if is_alive else 620 * 2**20
    moving = is_alive and not is_hung
    return DeviceReading(
        kind="gpu",
        ranks=(rank,),
        name=NAME,
        uuid=uuid(rank),
        utilization_percent=float(round(busy)),
        memory_used_bytes=used,
        memory_total_bytes=_TOTAL_BYTES,
        power_watts=float(round(452 + 6 * noise(2) if is_hot else power)),
        temperature_celsius=float(
            round(89 if is_hot else (43 if is_calm else 61) + rank % 4 + 0.7 * noise(3))
        ),
        memory_utilization_percent=float(round(0.45 * busy)) if moving else 0.0,
        power_limit_watts=POWER_LIMIT_WATTS,
        temperature_limit_celsius=87.0,
        sm_clock_mhz=1320 if is_hot else _MAX_MHZ if is_calm else 1755,
        sm_clock_max_mhz=_MAX_MHZ,
        memory_clock_mhz=2619,
        memory_clock_max_mhz=2619,
        throttle_reasons=("hot: hardware slowdown",) if is_hot else () if busy else ("idle",),
        nvlink_sent_bytes_per_second=21.4e9 * (1 + 0.03 * noise(4)) if moving else 0.0,
        nvlink_received_bytes_per_second=21.3e9 * (1 + 0.03 * noise(5)) if moving else 0.0,
        pcie_sent_bytes_per_second=31e6 * (1 + 0.2 * uniform(second, rank, 1)) if moving else 0.0,
        pcie_received_bytes_per_second=(
            84e6 * (1 + 0.2 * uniform(second, rank, 2)) if moving else 0.0
        ),
        ecc_corrected_errors=0,
        ecc_uncorrected_errors=0,
        processes=(GpuProcess(FIRST_PID + rank, used),) if is_alive else (),
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
