"""The process of one rank, as the operating system sees it."""

import time
from collections.abc import Callable, Mapping

import psutil

from boltmesh.tui.devices.rates import Rates
from boltmesh.tui.devices.reading import DeviceReading


class RankProcess:
    """A process that is looked at again and again.

    Memory is what is resident and what of it is shared, both for nothing. The proportional share
    would have the kernel walk all pages of the process for milliseconds, under a lock that the
    process needs to allocate.

    Args:
        pid: Of a process that lives.
        clock: Monotonic, in seconds.

    Raises:
        psutil.Error: It is gone, or not to be looked at.
    """

    def __init__(self, pid: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._process = psutil.Process(pid)
        self._rates = Rates(clock)
        self._is_first = True

    def read(self, rank: int, host: str, total_bytes: int) -> DeviceReading:
        """Return what is true now; what is a difference of two looks is not known at the first.

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
