"""The host that ranks of a job run on."""

from pathlib import Path

import psutil

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
        """Return what is true now; the load of its cores is not known at the first look."""
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
