"""What this host says of a job's devices and processes, read by whoever watches.

The job itself is not asked: NVML and psutil look from outside, so a reading costs training nothing.
Only what belongs to the job is reported: GPUs by the UUID that a rank recorded, processes by pid.
"""

import contextlib
import os
import socket
from collections.abc import Iterable
from types import ModuleType
from typing import Literal

import msgspec
import psutil

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot


class DeviceReading(msgspec.Struct, frozen=True):
    """One GPU that ranks of the job use, or the process of one rank. ``None``: not known."""

    kind: Literal["gpu", "process"]
    ranks: tuple[int, ...]
    """The ranks on this GPU, or the one rank whose process this is."""
    name: str
    """The product name of the GPU; of a process, the host's name."""
    uuid: str | None = None
    pid: int | None = None
    utilization_percent: float | None = None
    """Of a GPU: share of the last sampling period in which any kernel ran. Of a process: CPU time
    since the last reading, where 100 is one core."""
    memory_used_bytes: int | None = None
    """Of a GPU: by all processes on it. Of a process: its resident set."""
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None


class DeviceReader:
    """Reads the devices and processes of one job on this host, again and again."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._nvml: ModuleType | None = None
        self._nvml_was_tried = False

    def read(self, job: JobSnapshot) -> tuple[DeviceReading, ...]:
        """Return the readings for the ranks of ``job`` that live on this host.

        The first reading of a process knows no utilisation, for that is a difference of two.
        """
        here = [rank for rank in job.ranks if _is_on_this_host(rank)]
        return (*self._read_gpus(here), *self._read_processes(here))

    def close(self) -> None:
        """Let go of NVML."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _read_gpus(self, ranks: Iterable[RankSnapshot]) -> Iterable[DeviceReading]:
        ranks_by_uuid: dict[str, list[int]] = {}
        for rank in ranks:
            if rank.device_uuid is not None:
                ranks_by_uuid.setdefault(rank.device_uuid, []).append(rank.rank)
        # A job on CPUs never loads the driver's library.
        if ranks_by_uuid and (nvml := self._load_nvml()) is not None:
            for uuid, users in ranks_by_uuid.items():
                reading = _read_gpu(nvml, uuid, tuple(users))
                if reading is not None:
                    yield reading

    def _read_processes(self, ranks: Iterable[RankSnapshot]) -> Iterable[DeviceReading]:
        alive: dict[int, psutil.Process] = {}
        for rank in ranks:
            # The reader has compared start times, so a running rank's pid is not another's by now.
            if rank.pid is None or rank.state not in {"starting", "running"}:
                continue
            try:
                process = self._processes.get(rank.pid)
                is_first = process is None
                if process is None:
                    process = psutil.Process(rank.pid)
                with process.oneshot():
                    cpu_percent = process.cpu_percent(None)
                    rss_bytes = process.memory_info().rss
            except psutil.Error:
                continue
            alive[rank.pid] = process
            yield DeviceReading(
                kind="process",
                ranks=(rank.rank,),
                name=rank.host,
                pid=rank.pid,
                utilization_percent=None if is_first else cpu_percent,
                memory_used_bytes=rss_bytes,
                memory_total_bytes=psutil.virtual_memory().total,
            )
        self._processes = alive

    def _load_nvml(self) -> ModuleType | None:
        """Return ``pynvml``, initialised, or None on a host without NVIDIA's driver."""
        if not self._nvml_was_tried:
            self._nvml_was_tried = True
            import pynvml  # the driver's library loads slowly, and only jobs on CUDA need it

            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._nvml = pynvml
        return self._nvml


def _is_on_this_host(rank: RankSnapshot) -> bool:
    return rank.host in {"", socket.gethostname(), os.uname().nodename}


def _read_gpu(nvml: ModuleType, uuid: str, ranks: tuple[int, ...]) -> DeviceReading | None:
    """Return what NVML tells of the GPU; each figure alone may be unsupported on a model."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None
    name = uuid
    utilization = used = total = power = temperature = None
    with contextlib.suppress(nvml.NVMLError):
        name = str(nvml.nvmlDeviceGetName(handle))
    with contextlib.suppress(nvml.NVMLError):
        utilization = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with contextlib.suppress(nvml.NVMLError):
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        used, total = int(info.used), int(info.total)
    with contextlib.suppress(nvml.NVMLError):
        power = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    with contextlib.suppress(nvml.NVMLError):
        temperature = float(
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        )
    return DeviceReading(
        kind="gpu",
        ranks=ranks,
        name=name,
        uuid=uuid,
        utilization_percent=utilization,
        memory_used_bytes=used,
        memory_total_bytes=total,
        power_watts=power,
        temperature_celsius=temperature,
    )
