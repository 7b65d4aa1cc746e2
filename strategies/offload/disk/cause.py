"""What went wrong with a swap file, said so that somebody can mend it."""

import errno
import os
from pathlib import Path

from boltmesh.errors import OffloadError
from boltmesh.strategies.offload.sizes import describe_bytes

LARGER = "Free space there, or set strategy.offload_path to a folder on a larger disk"
OTHER = "Set strategy.offload_path to a folder on another disk"
RESUME = "; then resume from the last checkpoint, which this does not touch."

ADVICE = {
    errno.ENOSPC: LARGER,
    errno.EDQUOT: f"The quota of this user is used up. {LARGER}",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f unlimited)",
    errno.EIO: f"The disk reports a fault; the kernel's log (dmesg) tells which. {OTHER}",
    errno.EACCES: "Set strategy.offload_path to a folder that this user may write to",
    errno.ENOMEM: "Leave more memory to the system, or set a smaller strategy.offload_fraction",
}
"""What to do, by the kind of error."""


class ShortTransferError(OSError):
    """Fewer bytes were moved than asked for, and the system gave no reason."""

    def __init__(self, at: int, size: int) -> None:
        super().__init__(errno.EIO, f"the transfer ended at byte {at} of a file of {size}")


class DamagedBlockError(OSError):
    """A block came back other than it was written."""

    def __init__(self, at: int, num_bytes: int) -> None:
        super().__init__(
            errno.EIO,
            f"the {num_bytes} bytes from byte {at} on are not those that were written there",
        )


def explain(
    error: BaseException, doing: str, *, path: Path, rank: int, free_bytes: int | None
) -> OffloadError:
    """The error that ends the run: what failed, on which file, why, and what to set.

    Args:
        error: What was caught.
        doing: The action and its object, such as ``"write chunk 3 of the optimizer state to"``.
        path: The file, by the name that it was created under.
        rank: Whose file it is.
        free_bytes: What its file system has left, where that is known.
    """
    number = error.errno if isinstance(error, OSError) else None
    free = "" if free_bytes is None else f" ({describe_bytes(free_bytes)} free there)"
    explained = OffloadError(
        f"rank {rank} could not {doing} {path}{free}: {_reason(error)}. {_advice(error)}{RESUME}"
    )
    explained.errno = number
    return explained


def _reason(error: BaseException) -> str:
    if isinstance(error, ShortTransferError | DamagedBlockError):
        return str(error.strerror)
    if isinstance(error, OSError) and error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        return f"{os.strerror(error.errno)} ({name})"
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _advice(error: BaseException) -> str:
    if isinstance(error, ShortTransferError):
        return f"Something shortened the file, or the disk is full or failing. {LARGER}"
    if isinstance(error, DamagedBlockError):
        return f"The disk, its controller or the memory is failing. {OTHER}"
    number = error.errno if isinstance(error, OSError) else None
    return ADVICE.get(number, OTHER) if number is not None else OTHER
