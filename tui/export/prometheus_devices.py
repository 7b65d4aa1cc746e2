"""Devices, processes and hosts as Prometheus families."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.export.prometheus_text import Family, Labels, counter, gauge


def device_families(devices: Iterable[DeviceReading]) -> Iterator[Family]:
    """Yield the metrics of what a look read."""
    read = list(devices)
    gpus = [(_labels(each), each) for each in read if each.kind == "gpu"]
    for name, text, value in _GPU_GAUGES:
        yield gauge(f"device_{name}", text, [(labels, value(each)) for labels, each in gpus])
    for name, text, value in _GPU_COUNTERS:
        yield counter(f"device_{name}", text, [(labels, value(each)) for labels, each in gpus])
    for kind, gauges in (("process", _PROCESS_GAUGES), ("host", _HOST_GAUGES)):
        found = [(_labels(each), each) for each in read if each.kind == kind]
        for name, text, value in gauges:
            yield gauge(f"{kind}_{name}", text, [(labels, value(each)) for labels, each in found])


def _labels(device: DeviceReading) -> Labels:
    if device.kind == "gpu":
        return {"device": device.uuid or device.name}
    if device.kind == "host":
        return {"host": device.name}
    return {"rank": min(device.ranks, default=-1), "host": device.name}


def _hundredth(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _million(megahertz: int | None) -> float | None:
    return None if megahertz is None else megahertz * 1e6


_Gauges = tuple[tuple[str, str, Callable[[DeviceReading], float | None]], ...]

_GPU_GAUGES: Final[_Gauges] = (
    (
        "utilization_ratio",
        "Share of the last sampling period in which any kernel ran.",
        lambda each: _hundredth(each.utilization_percent),
    ),
    (
        "memory_utilization_ratio",
        "Share of the last sampling period in which the memory was read or written.",
        lambda each: _hundredth(each.memory_utilization_percent),
    ),
    (
        "memory_used_bytes",
        "Memory in use by all processes on a GPU.",
        lambda each: each.memory_used_bytes,
    ),
    ("memory_size_bytes", "Memory of a GPU.", lambda each: each.memory_total_bytes),
    ("power_watts", "Power that a GPU draws.", lambda each: each.power_watts),
    ("power_limit_watts", "Power that it may draw.", lambda each: each.power_limit_watts),
    ("temperature_celsius", "Temperature of a GPU.", lambda each: each.temperature_celsius),
    (
        "temperature_limit_celsius",
        "Temperature at which it slows down.",
        lambda each: each.temperature_limit_celsius,
    ),
    ("sm_clock_hertz", "Clock of its processors.", lambda each: _million(each.sm_clock_mhz)),
    ("memory_clock_hertz", "Clock of its memory.", lambda each: _million(each.memory_clock_mhz)),
    (
        "is_throttled",
        "Whether anything holds its clocks down.",
        lambda each: None if each.throttle_reasons is None else int(bool(each.throttle_reasons)),
    ),
    (
        "nvlink_sent_bytes_per_second",
        "Sent over all NVLinks since the last look.",
        lambda each: each.nvlink_sent_bytes_per_second,
    ),
    (
        "nvlink_received_bytes_per_second",
        "Received over all NVLinks since the last look.",
        lambda each: each.nvlink_received_bytes_per_second,
    ),
    (
        "pcie_sent_bytes_per_second",
        "Sent over PCIe, recently.",
        lambda each: each.pcie_sent_bytes_per_second,
    ),
    (
        "pcie_received_bytes_per_second",
        "Received over PCIe, recently.",
        lambda each: each.pcie_received_bytes_per_second,
    ),
)
_GPU_COUNTERS: Final[_Gauges] = (
    (
        "ecc_corrected_errors",
        "Corrected memory errors since the driver was loaded.",
        lambda each: each.ecc_corrected_errors,
    ),
    (
        "ecc_uncorrected_errors",
        "Uncorrected memory errors since the driver was loaded.",
        lambda each: each.ecc_uncorrected_errors,
    ),
)
_PROCESS_GAUGES: Final[_Gauges] = (
    (
        "cpu_ratio",
        "CPU time of a rank's process since the last look; 1 is one core.",
        lambda each: _hundredth(each.utilization_percent),
    ),
    (
        "resident_memory_bytes",
        "Resident memory of a rank's process.",
        lambda each: each.memory_used_bytes,
    ),
    ("threads", "Threads of a rank's process.", lambda each: each.num_threads),
    (
        "disk_read_bytes_per_second",
        "What a rank's process read from disks since the last look.",
        lambda each: each.disk_read_bytes_per_second,
    ),
    (
        "disk_written_bytes_per_second",
        "What a rank's process wrote to disks since the last look.",
        lambda each: each.disk_written_bytes_per_second,
    ),
)
_HOST_GAUGES: Final[_Gauges] = (
    (
        "cpu_ratio",
        "Mean use of a host's cores since the last look.",
        lambda each: _hundredth(each.utilization_percent),
    ),
    ("cores", "Cores that programs may use.", lambda each: each.num_cores),
    ("memory_used_bytes", "Memory in use on a host.", lambda each: each.memory_used_bytes),
    ("memory_size_bytes", "Memory of a host.", lambda each: each.memory_total_bytes),
    ("swap_used_bytes", "Swap in use on a host.", lambda each: each.swap_used_bytes),
    (
        "run_disk_free_bytes",
        "Free space on the disk of the run directory.",
        lambda each: each.disk_free_bytes,
    ),
)
