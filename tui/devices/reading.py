"""One reading of a GPU, of a rank's process, or of the host that they run on."""

from typing import Literal

import msgspec

NO_LIMIT = ("idle",)
"""Reasons for low clocks that slow nothing down."""

POWER_LIMIT = "power limit"
"""The normal state of a busy GPU."""


class GpuProcess(msgspec.Struct, frozen=True):
    """A process that computes on a GPU, of this job or of another user."""

    pid: int
    memory_bytes: int | None
    """GPU memory that it holds; None where the driver does not report it, as in containers."""


class DeviceReading(msgspec.Struct, frozen=True):
    """One GPU that ranks of the job use, the process of one rank, or their host.

    ``None``: not known. Each figure alone may be unsupported on a device, or hidden from this user.
    """

    kind: Literal["gpu", "process", "host"]
    ranks: tuple[int, ...]
    """The ranks on this GPU or host, or the one rank of this process."""
    name: str
    """The product name of the GPU; of a process and of a host, the host's name."""
    uuid: str | None = None
    pid: int | None = None
    utilization_percent: float | None = None
    """GPU: share of the last sampling period in which any kernel ran. Process: CPU time since the
    last reading, where 100 is one core. Host: the mean over its cores."""
    memory_used_bytes: int | None = None
    """GPU: by all processes on it. Process: its resident set. Host: what cannot be given to
    another process."""
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None

    memory_utilization_percent: float | None = None
    """GPU: share of the last sampling period in which its memory was read or written."""
    sm_active_percent: float | None = None
    """GPU with profiling counters (Hopper and later): mean share of its SMs that were busy since
    the last reading."""
    sm_occupancy_percent: float | None = None
    """Warps that were resident, of those that its SMs have room for."""
    tensor_active_percent: float | None = None
    """Share of the time in which its SMs computed on tensor cores."""
    memory_bandwidth_percent: float | None = None
    """Bandwidth of its memory that was used, of the peak."""
    power_limit_watts: float | None = None
    """The limit that the driver enforces now."""
    temperature_limit_celsius: float | None = None
    """Where the GPU begins to slow down."""
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    """Why the clocks are below their maximum, in words; empty: nothing holds them back."""
    nvlink_sent_bytes_per_second: float | None = None
    """Over all links, since the last reading."""
    nvlink_received_bytes_per_second: float | None = None
    pcie_sent_bytes_per_second: float | None = None
    pcie_received_bytes_per_second: float | None = None
    ecc_corrected_errors: int | None = None
    """Since the driver was loaded."""
    ecc_uncorrected_errors: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    """Processes that compute on the GPU."""

    shared_memory_bytes: int | None = None
    """Process: the part of its resident set that others may share."""
    num_threads: int | None = None
    disk_read_bytes_per_second: float | None = None
    """Process: bytes that came from a disk, not from a cache, since the last reading."""
    disk_written_bytes_per_second: float | None = None

    swap_used_bytes: int | None = None
    swap_total_bytes: int | None = None
    num_cores: int | None = None
    """Host: as its scheduler counts them, hyper-threads included."""
    disk_folder: str | None = None
    """Host: the run directory; its disk is the one that is measured."""
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    note: str | None = None
    """Host: why its GPUs are not read, if the job has any."""
