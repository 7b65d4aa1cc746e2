"""Host memory that is handed out again once nobody uses it any more.

The system clears each page before its first use and takes it back with the tensor, and FSDP2 makes
two tensors a unit and step to reduce gradients: on the host, most of that time goes into pages.
"""

import ctypes
import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from boltmesh.strategies.offload.memory import HUGE_PAGE_BYTES, allocate_host

REUSED_BYTES = 8 * HUGE_PAGE_BYTES
"""From here on memory is kept: below it, what the last page wastes is too much of the whole."""


class ReusedMemory:
    """Hands out tensors on memory that the tensors before them have left.

    Never holds more than was once in use at a time, whatever sizes are asked for: what has lain
    free for longest is returned to the system first.
    """

    def __init__(self) -> None:
        # Without a lock: the garbage collector may drop a tensor in any thread, also in ``take``.
        self._returned: deque[Tensor] = deque()
        self._lock = threading.Lock()
        self._free: list[Tensor] = []  # the longest unused one first
        self._used_bytes = 0
        self._peak_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of any values. Its memory comes back with the last tensor that views it."""
        num_bytes = numel * dtype.itemsize
        if num_bytes < REUSED_BYTES:
            return torch.empty(numel, dtype=dtype)
        memory = self._find(num_bytes)
        lease = (ctypes.c_char * num_bytes).from_address(memory.data_ptr())
        weakref.finalize(lease, self._returned.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=dtype)

    def _find(self, num_bytes: int) -> Tensor:
        with self._lock:
            self._sort_in()
            places = [n for n, each in enumerate(self._free) if each.numel() == num_bytes]
            used_bytes = self._used_bytes + num_bytes
            peak_bytes = max(self._peak_bytes, used_bytes)
            if places:
                memory = self._free.pop(places[-1])
            else:
                free_bytes = sum(each.numel() for each in self._free)
                while used_bytes + free_bytes > peak_bytes:
                    free_bytes -= self._free.pop(0).numel()
                memory = allocate_host(num_bytes, device=torch.device("cpu"))
            self._used_bytes, self._peak_bytes = used_bytes, peak_bytes
            return memory

    def _sort_in(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._used_bytes -= memory.numel()
            self._free.append(memory)

    @property
    def num_free_bytes(self) -> int:
        """What waits to be taken again."""
        with self._lock:
            self._sort_in()
            return sum(each.numel() for each in self._free)

    def give_back(self) -> None:
        """Return what is free to the system, and begin anew to note what is in use at a time."""
        with self._lock:
            self._sort_in()
            self._free.clear()
            self._peak_bytes = self._used_bytes
