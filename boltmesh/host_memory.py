"""Memory of this host: its size and use, and the limits of this process's cgroups."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory_bytes() -> int:
    """Return the memory that processes here may take together: all, or a container's limit."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup_limit()
    return physical if limit is None else min(limit, physical)


def cgroup_limit() -> int | None:
    """Return the least memory limit of the cgroups of this process, of version 2 or 1."""
    try:
        own = OWN_CGROUPS.read_text(encoding="utf-8")
    except OSError:
        return None
    files = []
    for line in own.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base, name = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may see its own cgroup as the root, or by its path outside.
        group = Path(path.lstrip("/"))
        files += [base / part / name for part in (group, *group.parents)]
    limits = [limit for file in files if (limit := _read_limit(file)) is not None]
    return min(limits, default=None)


def _read_limit(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    # Version 1 writes a number near 2**63 in place of "max".
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None
