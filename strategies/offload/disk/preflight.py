"""Measures the disk before training, on the rank's own file, and predicts the time of a step.

All ranks of a host measure at the same time, since that is how they use the disk.
"""

import resource
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from boltmesh.file_system import IN_MEMORY, file_system_of
from boltmesh.lightning_import import logger
from boltmesh.strategies.object_collectives import gather_objects
from boltmesh.strategies.offload.disk.swap_file import Extent, Swap
from boltmesh.strategies.offload.disk.transfer import BLOCK_BYTES, Ticket
from boltmesh.strategies.offload.host_memory import (
    PAGE_BYTES,
    allocate_host,
    describe_bytes,
    has_huge_pages,
)
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder

log = logger()
"""Lightning's logger, where users look for messages of a run."""

SAMPLE_BYTES = 64 << 20
"""Size of one transfer in each direction: many blocks per thread."""

LEAST_BYTES = 2 * PAGE_BYTES
"""Size of the smallest file that can be measured: a transfer in each direction at once."""

MEASURE_S = 0.25
"""Duration of each of the three measurements, at least one transfer. A file that is smaller than
the samples is measured by a single transfer: its transfers take no time that matters."""

ADAM_NUMEL = 1 << 21
"""Elements of the trial step: 32 MB, more than caches hold."""


@dataclass(frozen=True)
class DiskLoad:
    """Bytes that a rank moves between memory and disk."""

    step_read_bytes: int
    """Per optimizer step."""
    step_write_bytes: int
    numel: int
    """Elements of state on the disk that a step updates."""
    gather_bytes: int = 0
    """Read per pass over the model, forward or backward, where parameters are on disk."""


@dataclass(frozen=True)
class DiskReport:
    """One rank's disk. Rates are in bytes per second while the other ranks measure too."""

    host: str
    folder: str
    file_system: str
    is_direct: bool
    taken_bytes: int
    free_bytes: int
    read_rate: float
    write_rate: float
    both_rate: float
    """Rate of each direction when both run at once."""
    adam_rate: float
    """Elements per second of a fused step in host memory."""
    has_huge_pages: bool
    locked_bytes: int | None
    """Limit of page-locked memory; None if unlimited."""
    load: DiskLoad

    @property
    def step_s(self) -> float:
        """Least time of an optimizer step: its transfers or its arithmetic, which overlap.

        Reads and writes that overlap are counted at the rate measured for both at once.
        """
        reads, writes = self.load.step_read_bytes, self.load.step_write_bytes
        common = min(reads, writes)
        transfers_s = (
            common / self.both_rate
            + (reads - common) / self.read_rate
            + (writes - common) / self.write_rate
        )
        return max(transfers_s, self.load.numel / self.adam_rate)

    @property
    def pass_s(self) -> float:
        """Time to read the parameters for one pass over the model."""
        return self.load.gather_bytes / self.read_rate


def measure_disk(swap: Swap, load: DiskLoad) -> DiskReport:
    """Measure the rank's file before anything is stored in it. All ranks call it together.

    Takes about a second, or one transfer of 64 MiB in each direction if that is longer.
    """
    sample = min(SAMPLE_BYTES, swap.file.size // 2 // PAGE_BYTES * PAGE_BYTES)
    assert sample > 0, "the space of the file is taken before it is measured"
    duration_s = MEASURE_S if sample == SAMPLE_BYTES else 0.0
    one, other = (_scratch(n * sample, sample) for n in range(2))
    # One buffer for both: reads return exactly the bytes that were written from it. Random bytes,
    # since some disks do not store zeros.
    buffer = allocate_host(sample, device=torch.device("cpu"))
    buffer.random_(0, 256, generator=torch.Generator().manual_seed(0))
    # Allocated space that was never written is slow to write and reads as zeros, faster than any
    # disk: write both samples before measuring.
    swap.write(one, buffer).wait()
    swap.write(other, buffer).wait()
    write_rate = sample / _seconds(lambda: [swap.write(other, buffer)], duration_s)
    read_rate = sample / _seconds(lambda: [swap.read(one, buffer)], duration_s)
    both_rate = sample / _seconds(
        lambda: [swap.read(one, buffer), swap.write(other, buffer)], duration_s
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return DiskReport(
        host=socket.gethostname(),
        folder=str(swap.folder),
        file_system=file_system_of(swap.folder),
        is_direct=swap.file.is_direct,
        taken_bytes=swap.file.size,
        free_bytes=swap.file.free_bytes(),
        read_rate=read_rate,
        write_rate=write_rate,
        both_rate=both_rate,
        adam_rate=_adam_rate(),
        has_huge_pages=has_huge_pages(),
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        load=load,
    )


def announce_disks(
    report: DiskReport | None, *, group: ProcessGroup, recorder: Recorder | NullRecorder
) -> None:
    """Log the speed of the disks once, on the first rank.

    Collective over ``group``. ``report`` is None on a rank that stores nothing on a disk.
    """
    reports = gather_objects(report, group)
    known = [each for each in reports if each is not None]
    if known and group.rank() == 0:
        line = preflight_line(known)
        log.info("boltmesh: %s", line)
        recorder.event("start", line)


def preflight_line(reports: Sequence[DiskReport]) -> str:
    """Format one line for all ranks: figures of the first rank's host, time of the slowest rank."""
    first = reports[0]
    here = [each for each in reports if each.host == first.host]
    ranks = "1 rank takes" if len(here) == 1 else f"{len(here)} ranks take"
    taken = describe_bytes(sum(each.taken_bytes for each in here))
    free = describe_bytes(min(each.free_bytes for each in here))
    read, write, both = (
        f"{min(getattr(each, name) for each in here) / 1e9:.3g} GB/s"
        for name in ("read_rate", "write_rate", "both_rate")
    )
    pages = "2 MiB pages" if first.has_huge_pages else "no 2 MiB pages, so up to 2.6 times slower"
    limit = first.locked_bytes
    locked = "unlimited" if limit is None else f"up to {describe_bytes(limit)}"
    return (
        f"offload to {first.folder} ({first.file_system}, {_way(first)}): {ranks} {taken}, {free} "
        f"stay free; each rank reads {read}, writes {write}, both at once {both}; "
        f"{pages}; locked memory {locked}; {_times(reports)}"
    )


def _way(report: DiskReport) -> str:
    if report.file_system in IN_MEMORY:
        return "which is host memory, not a disk"
    return "direct I/O" if report.is_direct else "through the page cache: it refuses direct I/O"


def _times(reports: Sequence[DiskReport]) -> str:
    slowest = max(reports, key=lambda each: each.step_s)
    where = f" on {slowest.host}" if slowest.host != reports[0].host else ""
    longest_pass_s = max(each.pass_s for each in reports)
    gathers = f", reading all parameters {_time(longest_pass_s)}" if longest_pass_s else ""
    return f"an optimizer step takes about {_time(slowest.step_s)}{where}{gathers}"


def _scratch(offset: int, num_bytes: int) -> Extent:
    num_blocks = -(-num_bytes // BLOCK_BYTES)
    return Extent("the sample of the preflight", offset, num_bytes, [None] * num_blocks)


def _seconds(begin: Callable[[], list[Ticket]], duration_s: float) -> float:
    """Return the median time from a call until its tickets are done."""
    times: list[float] = []
    while not times or sum(times) < duration_s:
        start = time.monotonic()
        for ticket in begin():
            ticket.wait()
        times.append(time.monotonic() - start)
    return sorted(times)[len(times) // 2]


def _adam_rate() -> float:
    parameter = Parameter(torch.zeros(ADAM_NUMEL))
    parameter.grad = torch.ones(ADAM_NUMEL)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()  # makes the moments
    start = time.monotonic()
    optimizer.step()
    return ADAM_NUMEL / (time.monotonic() - start)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
