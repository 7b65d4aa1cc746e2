"""The resident set of this process, from the kernel.

It tells the truth about tensors only where each of them is a mapping of its own: start the process
with ``OWN_MAPPINGS`` in its environment, or the C library keeps what was freed.
"""

from pathlib import Path

OWN_MAPPINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def resident_bytes(key: str = "VmRSS") -> int:
    """``VmRSS`` is what is resident now, ``VmHWM`` the most since ``forget_peak``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
