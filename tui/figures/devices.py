"""The readings of this host by what they are of, beside what the ranks say of themselves."""

import msgspec

from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.state import State


class GpuRow(msgspec.Struct, frozen=True):
    """One GPU of the job."""

    device: str
    """As its first rank calls it, such as ``cuda:1``."""
    ranks: tuple[int, ...]
    reading: DeviceReading
    foreign_pids: tuple[int, ...]
    """Processes on it that are not of this job; empty too where the driver does not tell."""

    @property
    def memory_share(self) -> float | None:
        """Used over total."""
        return share(self.reading.memory_used_bytes, self.reading.memory_total_bytes)


class ProcessRow(msgspec.Struct, frozen=True):
    """The process of one rank."""

    rank: int
    reading: DeviceReading


def gpu_rows(state: State) -> list[GpuRow]:
    """Return the GPUs in the order of their ranks."""
    names = {rank.rank: rank.device.partition(" (")[0] for rank in state.job.ranks}
    own = {rank.pid for rank in state.job.ranks if rank.pid is not None}
    rows = []
    for reading in state.devices:
        if reading.kind != "gpu":
            continue
        pids = [process.pid for process in reading.processes or ()]
        # In a container NVML gives the host's numbers; if none is known, none can be told apart.
        is_known = any(pid in own for pid in pids)
        rows.append(
            GpuRow(
                device=names.get(min(reading.ranks, default=-1), ""),
                ranks=reading.ranks,
                reading=reading,
                foreign_pids=tuple(pid for pid in pids if is_known and pid not in own),
            )
        )
    return sorted(rows, key=lambda row: min(row.ranks, default=-1))


def process_rows(state: State) -> list[ProcessRow]:
    """Return the processes in the order of their ranks."""
    rows = [
        ProcessRow(reading.ranks[0], reading)
        for reading in state.devices
        if reading.kind == "process" and reading.ranks
    ]
    return sorted(rows, key=lambda row: row.rank)


def host_reading(state: State) -> DeviceReading | None:
    """Return the reading of this host, if ranks run on it."""
    return next((reading for reading in state.devices if reading.kind == "host"), None)


def share(part: float | None, whole: float | None) -> float | None:
    """Return ``part`` of ``whole``, where both are known and the whole is not nothing."""
    return None if part is None or not whole else part / whole
