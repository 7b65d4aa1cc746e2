"""Gives freed memory back to the system.

glibc keeps what is freed for later. Between large tensors that come and go lie small ones that
stay, so the gaps fit nothing large any more, and a model that is built tensor by tensor would keep
the memory of all of it.
"""

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


def give_back_free_memory() -> None:
    """Return the pages that this process has freed; nothing on systems whose C library does."""
    trim = _trim()
    if trim is not None:
        trim(0)
