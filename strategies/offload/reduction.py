"""Where FSDP2 reduces gradients to, when the model is computed on the host.

FSDP2 asks for two new tensors a unit and step, and copies one to the other where there is nothing
to reduce. On the host most of that time goes into pages: the system clears each of them before its
first use, and takes it back with the tensor. Here tensors lie on 2 MiB pages that are used again
by a later tensor of their size, and a group of one process has the second tensor for nothing: it
is the first.
"""

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.offload.memory import HUGE_PAGE_BYTES, allocate_host
from boltmesh.strategies.torch_compat import DefaultReduceScatter

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
        self._is_closed = False

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of any values. Its memory comes back with the last tensor that views it."""
        num_bytes = numel * dtype.itemsize
        if num_bytes < REUSED_BYTES:
            return torch.empty(numel, dtype=dtype)
        memory = self._find(num_bytes)
        lease = (ctypes.c_char * num_bytes).from_address(memory.data_ptr())
        weakref.finalize(lease, self._give_back, memory).atexit = False
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

    def _give_back(self, memory: Tensor) -> None:
        """On any thread that drops a tensor."""
        if not self._is_closed:
            self._returned.append(memory)

    @property
    def num_free_bytes(self) -> int:
        """What waits to be taken again."""
        with self._lock:
            self._sort_in()
            return sum(each.numel() for each in self._free)

    def close(self) -> None:
        """Return what is free to the system; what is still used follows with its tensors."""
        self._is_closed = True
        with self._lock:
            self._returned.clear()
            self._free.clear()


class HostReduction(DefaultReduceScatter):
    """FSDP2's reduce-scatter of one unit with tensors of a ``ReusedMemory``.

    Args:
        memory: Where tensors lie.
        num_ranks: Of the group that the unit is sharded over.
    """

    def __init__(self, memory: ReusedMemory, num_ranks: int) -> None:
        self._memory = memory
        self._is_alone = num_ranks == 1
        self._input: Tensor | None = None

    @override
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        numel = int(size[0])
        if (given := self._input) is not None:
            self._input = None
            if given.numel() == numel and given.dtype == dtype:
                return given  # FSDP2 copies it to itself, which does nothing
        taken = self._memory.take(numel, dtype)
        if self._is_alone:
            self._input = taken
        return taken

    def finish(self) -> None:
        """A reduction has ended, perhaps with an error: what is asked for next begins another."""
        self._input = None
