"""FSDP2's gathers and reductions of a model that is computed on the host.

Left to itself, FSDP2 waits for each gather where it asks for it, so that nothing overlaps. Here a
gather is waited for where its parameters are used: what FSDP2 asks for ahead, in a backward pass,
arrives meanwhile. Where gradients leave at once they are reduced in memory that is used again, and
a group of one process has the result for nothing: it is the input.

Collectives are posted at the group's backend itself. torch's functions pass its dispatcher, where
telemetry looks on from a kernel in Python; it gets a record of them here instead.

``BufferPool`` hands out host memory again once no tensor uses it. The system clears each page
before its first use and takes it back with the tensor, and FSDP2 makes two tensors a unit and step
to reduce gradients: on the host, most of that time goes into pages.
"""

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from boltmesh.strategies.offload.host_memory import HUGE_PAGE_BYTES, allocate_host
from boltmesh.strategies.torch_compat.communication import gather_on_host, reduce_scatter_on_host
from boltmesh.strategies.torch_compat.fsdp_hooks import (
    DefaultAllGather,
    EndedReduceScatter,
    reduce_with,
)
from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES

REUSED_BYTES = 8 * HUGE_PAGE_BYTES
"""From here on memory is kept: below it, what the last page wastes is too much of the whole."""


class BufferPool:
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


class CpuAllGather(DefaultAllGather):
    """FSDP2's all-gather of one unit."""

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Return what FSDP2 waits for before it reads the result, whatever ``async_op`` says."""
        post = partial(gather_on_host, output_tensor, input_tensor, group)
        return COLLECTIVES.post("_allgather_base", group, output_tensor.nbytes, post)


class CpuReduceScatter(EndedReduceScatter):
    """FSDP2's reduce-scatter of one unit.

    Args:
        memory: Where tensors lie; None: in new memory each time.
        num_ranks: Of the group that the unit is sharded over.
    """

    def __init__(self, memory: BufferPool | None, num_ranks: int) -> None:
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
        if self._memory is None:
            taken = torch.empty(numel, dtype=dtype)
        else:
            taken = self._memory.take(numel, dtype)
        if self._is_alone:
            self._input = taken
        return taken

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work:
        """Return when the result is there: FSDP2 reads it at once, and never asks for less."""
        post = partial(reduce_scatter_on_host, output_tensor, input_tensor, group, op)
        work = COLLECTIVES.post("_reduce_scatter_base", group, input_tensor.nbytes, post)
        work.wait()
        return work

    @override
    def finish(self) -> None:
        """See base class: what is asked for next begins another reduction."""
        self._input = None


class CpuCollectives:
    """Those of all units of a model.

    Args:
        units: Of ``fully_shard``, on the CPU.
        takes_gradients_away: They are read, and dropped, as they come, so reductions use memory
            again. Where gradients stay until the optimizer steps, memory that waits for the next
            ones would come on top of gathered parameters.
    """

    def __init__(self, units: Iterable[FSDPModule], *, takes_gradients_away: bool) -> None:
        self._memory = BufferPool() if takes_gradients_away else None
        reducing = partial(CpuReduceScatter, self._memory)
        for unit in units:
            unit.set_custom_all_gather(CpuAllGather())
            reduce_with(unit, reducing)

    @classmethod
    def where_needed(
        cls, units: Iterable[FSDPModule], device: torch.device, *, takes_gradients_away: bool
    ) -> "CpuCollectives | None":
        """Return those of a model on a device; None where torch's own are the right ones."""
        if device.type != "cpu":
            return None
        return cls(units, takes_gradients_away=takes_gradients_away)

    @property
    def num_free_bytes(self) -> int:
        """What waits for the next reduction."""
        return 0 if self._memory is None else self._memory.num_free_bytes

    def give_back(self) -> None:
        """Return it to the system."""
        if self._memory is not None:
            self._memory.give_back()
