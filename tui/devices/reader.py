"""Reads the GPUs, the processes and the host of one job, once a look.

``Host`` is the host that ranks run on, ``RankProcess`` the process of one rank as the operating
system sees it; GPUs are in ``gpu.py``.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import psutil

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.tui.devices.gpu import Gpu, Rates
from boltmesh.tui.devices.reading import DeviceReading


class Host:
    """This host, looked at again and again.

    Args:
        folder: The run directory, whose disk must not fill up; None: no disk is looked at.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._is_first = True

    def read(self, ranks: tuple[int, ...], name: str, note: str | None) -> DeviceReading:
        """Return the present reading; the load of its cores is unknown at the first look."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        busy_percent = psutil.cpu_percent(None)
        is_first, self._is_first = self._is_first, False
        free, total = self._disk()
        return DeviceReading(
            kind="host",
            ranks=ranks,
            name=name,
            utilization_percent=None if is_first else busy_percent,
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            swap_used_bytes=swap.used,
            swap_total_bytes=swap.total,
            num_cores=psutil.cpu_count(),
            disk_folder=None if self._folder is None else str(self._folder),
            disk_free_bytes=free,
            disk_total_bytes=total,
            note=note,
        )

    def _disk(self) -> tuple[int | None, int | None]:
        if self._folder is None:
            return None, None
        try:
            usage = psutil.disk_usage(str(self._folder))
        except OSError:  # a cleaner took it
            return None, None
        return usage.free, usage.total


class RankProcess:
    """A process that is looked at again and again.

    Memory is what is resident and what of it is shared, both for nothing. The proportional share
    would have the kernel walk all pages of the process for milliseconds, under a lock that the
    process needs to allocate.

    Args:
        pid: Process id; the process must be running.
        clock: Monotonic, in seconds.

    Raises:
        psutil.Error: It has ended, or may not be read.
    """

    def __init__(self, pid: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._process = psutil.Process(pid)
        self._rates = Rates(clock)
        self._is_first = True

    def read(self, rank: int, host: str, total_bytes: int) -> DeviceReading:
        """Return the present reading; differences of two looks are unknown at the first.

        Raises:
            psutil.Error: The process is gone.
        """
        process = self._process
        with process.oneshot():
            cpu_percent = process.cpu_percent(None)
            memory = process.memory_info()
            num_threads = process.num_threads()
            rates = self._rates.since_last(self._disk_bytes())
        is_first, self._is_first = self._is_first, False
        return DeviceReading(
            kind="process",
            ranks=(rank,),
            name=host,
            pid=process.pid,
            utilization_percent=None if is_first else cpu_percent,
            memory_used_bytes=memory.rss,
            memory_total_bytes=total_bytes,
            shared_memory_bytes=getattr(memory, "shared", None),
            num_threads=num_threads,
            disk_read_bytes_per_second=rates.get("read"),
            disk_written_bytes_per_second=rates.get("written"),
        )

    def _disk_bytes(self) -> Mapping[str, float]:
        try:
            counters = self._process.io_counters()
        except (psutil.AccessDenied, NotImplementedError, OSError):
            return {}
        return {"read": counters.read_bytes, "written": counters.write_bytes}


class DeviceReader:
    """Reads the devices, the processes and the host of one job, again and again.

    Args:
        folder: The run directory, to watch the space on its disk.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._processes: dict[int, RankProcess] = {}
        self._gpus: dict[str, Gpu] = {}
        self._host = Host(folder)
        self._nvml: ModuleType | None = None
        self._nvml_was_tried = False
        self._no_nvml: str | None = None
        self._looks = 0

    def read(self, job: JobSnapshot) -> tuple[DeviceReading, ...]:
        """Return the readings for the ranks of ``job`` that live on this host.

        The pid and the GPU of a rank that has ended may be another's by now.
        """
        names = {"", socket.gethostname(), os.uname().nodename}
        # A summary comes from another host, also where both go by one name.
        here = [
            rank
            for rank in job.ranks
            if rank.is_alive and rank.host in names and not rank.is_summary
        ]
        gpus = self._read_gpus(here)
        processes = list(self._read_processes(here))
        note = self._note(here, gpus)
        readings = [*gpus, *processes]
        if processes or note is not None:
            ranks = tuple(rank.rank for rank in here)
            readings.append(self._host.read(ranks, here[0].host, note))
        self._looks += 1
        return tuple(readings)

    def close(self) -> None:
        """Let go of NVML."""
        self._gpus.clear()
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _read_gpus(self, ranks: Iterable[RankSnapshot]) -> list[DeviceReading]:
        users = _by_gpu(ranks)
        # A job on CPUs never loads the driver's library.
        nvml = self._load_nvml() if users else None
        if nvml is None:
            return []
        readings = []
        for place, (uuid, numbers) in enumerate(users.items()):
            # Measuring PCIe takes time, so one GPU a look has its turn.
            may_wait = place == self._looks % len(users)
            try:
                if uuid not in self._gpus:
                    self._gpus[uuid] = Gpu(nvml, uuid)
                readings.append(self._gpus[uuid].read(tuple(numbers), may_wait=may_wait))
            except nvml.NVMLError:
                continue
        return readings

    def _read_processes(self, ranks: Iterable[RankSnapshot]) -> Iterable[DeviceReading]:
        alive: dict[int, RankProcess] = {}
        total_bytes = psutil.virtual_memory().total
        for rank in ranks:
            if rank.pid is None:
                continue
            try:
                process = self._processes.get(rank.pid) or RankProcess(rank.pid)
                reading = process.read(rank.rank, rank.host, total_bytes)
            except psutil.Error:
                continue
            alive[rank.pid] = process
            yield reading
        self._processes = alive

    def _note(self, ranks: Sequence[RankSnapshot], gpus: Sequence[DeviceReading]) -> str | None:
        """Say why GPUs of the job have no reading."""
        wanted = _by_gpu(ranks)
        if not wanted or len(gpus) == len(wanted):
            return None
        if self._no_nvml is not None:
            return f"GPUs are not read: {self._no_nvml}"
        missing = [uuid for uuid in wanted if uuid not in {gpu.uuid for gpu in gpus}]
        return f"NVML does not know {', '.join(missing)}: hidden from this user or container"

    def _load_nvml(self) -> ModuleType | None:
        """Return ``pynvml``, initialised, or None on a host without NVIDIA's driver."""
        if not self._nvml_was_tried:
            self._nvml_was_tried = True
            import pynvml  # the driver's library loads slowly, and only jobs on CUDA need it

            try:
                pynvml.nvmlInit()
                self._nvml = pynvml
            except pynvml.NVMLError as error:
                self._no_nvml = str(error)
        return self._nvml


def _by_gpu(ranks: Iterable[RankSnapshot]) -> dict[str, list[int]]:
    """Return the ranks on each GPU, by its UUID."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.device_uuid is not None:
            found.setdefault(rank.device_uuid, []).append(rank.rank)
    return found
