"""The file system of a folder, from the kernel's table of mounts."""

from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""Types whose files are host memory."""


def file_system_of(folder: Path) -> str:
    """Return the type of a folder's file system, in the kernel's spelling."""
    path = folder.resolve()
    best, kind = -1, "unknown file system"
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = before.split()[4].replace("\\040", " ")
        # The last of equal ones hides those before it.
        if path.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), after.split()[0]
    return kind
