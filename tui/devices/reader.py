"""Reads everything that this host can tell of one job, once a look."""

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import psutil

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.tui.devices.gpu import Gpu
from boltmesh.tui.devices.host import Host
from boltmesh.tui.devices.process import RankProcess
from boltmesh.tui.devices.reading import DeviceReading


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
        """Return the readings for the ranks of ``job`` that live on this host."""
        names = {"", socket.gethostname(), os.uname().nodename}
        # A summary comes from another host, also where both go by one name.
        here = [rank for rank in job.ranks if rank.host in names and not rank.is_summary]
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
            # The reader has compared start times, so a running rank's pid is not another's by now.
            if rank.pid is None or rank.state not in {"starting", "running"}:
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
