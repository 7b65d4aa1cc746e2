"""FSDP2's gathers and reductions for a model on the CPU.

By default FSDP2 waits for each gather where it requests it, so that nothing overlaps. Here a gather
is waited for where its parameters are used, so gathers that FSDP2 requests early in a backward pass
overlap with it. Where gradients leave at once, they are reduced in memory that is reused. A group
of one process needs no reduction: the result is the input.

Collectives are posted directly on the group's backend: torch's functions would pass the dispatcher,
where telemetry runs a kernel in Python. Telemetry gets a record of them here instead.

``BufferPool`` reuses host memory that no tensor uses any more. Otherwise the system clears each
page before its first use and takes it back with the tensor, and FSDP2 makes two per unit and
step to reduce gradients: on a host, most of their time is spent on pages.
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
"""Smaller tensors are not pooled: the unused rest of their last page is too large a part."""


class BufferPool:
    """Makes tensors on memory that earlier tensors no longer use.

    Never holds more than the peak of what was in use at one time, whatever the sizes: the memory
    that was free for longest is returned to the system first.
    """

    def __init__(self) -> None:
        # Without a lock: the garbage collector may drop a tensor in any thread, also in ``take``.
        self._returned: deque[Tensor] = deque()
        self._lock = threading.Lock()
        self._free: list[Tensor] = []  # the longest unused one first
        self._used_bytes = 0
        self._peak_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory, ``(numel,)``, reused once no tensor views it any more."""
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
        """Bytes that are free for reuse."""
        with self._lock:
            self._sort_in()
            return sum(each.numel() for each in self._free)

    def give_back(self) -> None:
        """Return free memory to the system, and restart the measurement of the peak."""
        with self._lock:
            self._sort_in()
            self._free.clear()
            self._peak_bytes = self._used_bytes


class CpuAllGather(DefaultAllGather):
    """FSDP2's all-gather for one unit."""

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Gather shards into ``output_tensor``; returns the work to wait for, also if not async.

        Args:
            output_tensor: ``(ranks * N,)``, filled.
            input_tensor: This rank's shards, ``(N,)``.
            group: The ranks.
            async_op: Ignored.
        """
        post = partial(gather_on_host, output_tensor, input_tensor, group)
        return COLLECTIVES.post("_allgather_base", group, output_tensor.nbytes, post)


class CpuReduceScatter(EndedReduceScatter):
    """FSDP2's reduce-scatter for one unit; without ``memory`` each tensor has new memory."""

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
        """Reduce and return when the result is there: FSDP2 reads it at once.

        Args:
            output_tensor: This rank's shard of the result, ``(N,)``, filled.
            input_tensor: Gradients, ``(ranks * N,)``.
            group: The ranks.
            op: Sum or average.
            async_op: Ignored.
        """
        post = partial(reduce_scatter_on_host, output_tensor, input_tensor, group, op)
        work = COLLECTIVES.post("_reduce_scatter_base", group, input_tensor.nbytes, post)
        work.wait()
        return work

    @override
    def finish(self) -> None:
        """See base class: the next ``allocate`` begins another reduction."""
        self._input = None


class CpuCollectives:
    """Gathers and reductions for all units of a model.

    Args:
        units: Modules of ``fully_shard``, on the CPU.
        takes_gradients_away: Gradients are read and dropped as they appear, so reductions reuse
            memory. If gradients stay until the optimizer steps, free memory kept for the next
            reductions would add to the peak of gathered parameters.
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
        """Return an instance for a model on the CPU; None for other devices."""
        if device.type != "cpu":
            return None
        return cls(units, takes_gradients_away=takes_gradients_away)

    @property
    def num_free_bytes(self) -> int:
        """Bytes that are free for the next reduction."""
        return 0 if self._memory is None else self._memory.num_free_bytes

    def give_back(self) -> None:
        """Return the free memory to the system."""
        if self._memory is not None:
            self._memory.give_back()
