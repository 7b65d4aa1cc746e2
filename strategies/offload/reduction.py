"""Where FSDP2 reduces gradients to, when the model is computed on the host.

FSDP2 asks for two new tensors a unit and step, and copies one to the other where there is nothing
to reduce. On the host most of that time goes into pages: the system clears each of them before its
first use, and takes it back with the tensor. Here tensors lie on 2 MiB pages that are used again
by the next tensor of their size, and a group of one process has the second tensor for nothing: it
is the first.
"""

import ctypes
import weakref
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

    Without a lock, which a tensor that the garbage collector drops could meet on its own thread:
    methods of lists and dictionaries are atomic.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._is_closed = False

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of any values. Its memory comes back with the last tensor that views it."""
        num_bytes = numel * dtype.itemsize
        if num_bytes < REUSED_BYTES:
            return torch.empty(numel, dtype=dtype)
        try:
            memory = self._free.setdefault(num_bytes, []).pop()
        except IndexError:
            memory = allocate_host(num_bytes, device=torch.device("cpu"))
        lease = (ctypes.c_char * num_bytes).from_address(memory.data_ptr())
        weakref.finalize(lease, self._give_back, memory).atexit = False
        return torch.frombuffer(lease, dtype=dtype)

    def _give_back(self, memory: Tensor) -> None:
        """On any thread that drops a tensor."""
        if not self._is_closed:
            self._free[memory.numel()].append(memory)

    @property
    def num_free_bytes(self) -> int:
        """What waits to be taken again."""
        return sum(num_bytes * len(free) for num_bytes, free in list(self._free.items()))

    def close(self) -> None:
        """Return what is free to the system; what is still used follows with its tensors."""
        self._is_closed = True
        for free in list(self._free.values()):
            free.clear()


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
