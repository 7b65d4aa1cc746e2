"""How FSDP2 gathers and reduces where the model is computed on the host.

Left to itself, it waits for each gather where it asks for it, so that nothing overlaps, and makes
new tensors for each. Here a gather is waited for where its parameters are used: what FSDP2 asks for
ahead, in a backward pass, arrives meanwhile. It lies in memory that is used again. A group of one
process has the result of a reduction for nothing: it is the input.

Collectives are posted at the group's backend itself. torch's functions pass its dispatcher, where
telemetry looks on from a kernel in Python; it is told of them here instead.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from boltmesh.strategies.data.reused_memory import ReusedMemory
from boltmesh.strategies.torch_compat import (
    AllGather,
    EndedReduceScatter,
    gather_on_host,
    reduce_scatter_on_host,
    reduce_with,
)
from boltmesh.telemetry.recording.torch_compat import COLLECTIVES


class HostAllGather(AllGather):
    """FSDP2's all-gather of one unit, into tensors of a ``ReusedMemory``."""

    def __init__(self, memory: ReusedMemory) -> None:
        self._memory = memory

    @override
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self._memory.take(int(size[0]), dtype)

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


class HostReduceScatter(EndedReduceScatter):
    """FSDP2's reduce-scatter of one unit, from and to tensors of a ``ReusedMemory``.

    Args:
        memory: Where tensors lie.
        num_ranks: Of the group that the unit is sharded over.
        keeps_memory: What is reduced has memory of its own. If not, it has what a gather has left,
            or none that is used again, and the result never has.
    """

    def __init__(self, memory: ReusedMemory, num_ranks: int, *, keeps_memory: bool) -> None:
        self._memory = memory
        self._is_alone = num_ranks == 1
        self._keeps_memory = keeps_memory
        self._input: Tensor | None = None

    @override
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Called for the input of a reduction, and then for its result."""
        numel = int(size[0])
        given, self._input = self._input, None
        if given is None:
            self._input = self._take(numel, dtype, is_result=self._is_alone)
            return self._input
        if self._is_alone and given.numel() == numel and given.dtype == dtype:
            return given  # FSDP2 copies it to itself, which does nothing
        return self._take(numel, dtype, is_result=True)

    def _take(self, numel: int, dtype: torch.dtype, *, is_result: bool) -> Tensor:
        if is_result and not self._keeps_memory:
            return torch.empty(numel, dtype=dtype)
        return self._memory.take(numel, dtype, may_grow=self._keeps_memory)

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
        work = COLLECTIVES.post(
            "_reduce_scatter_base", group, input_tensor.nbytes, post, is_synchronous=True
        )
        work.wait()
        return work

    @override
    def finish(self) -> None:
        """See base class: what is asked for next begins another reduction."""
        self._input = None


class HostCollectives:
    """Those of all units of a model.

    Args:
        units: Of ``fully_shard``, on the CPU.
        takes_gradients_away: They are read, and dropped, as they come. Where they stay until the
            optimizer steps, what waits for the next ones would come on top of gathered parameters.
    """

    def __init__(self, units: Iterable[FSDPModule], *, takes_gradients_away: bool) -> None:
        self.memory = ReusedMemory()
        reducing = partial(HostReduceScatter, self.memory, keeps_memory=takes_gradients_away)
        for unit in units:
            unit.set_custom_all_gather(HostAllGather(self.memory))
            reduce_with(unit, reducing)

    @classmethod
    def where_needed(
        cls, units: Iterable[FSDPModule], device: torch.device, *, takes_gradients_away: bool
    ) -> "HostCollectives | None":
        """Return those of a model on a device; None where torch's own are the right ones."""
        if device.type != "cpu":
            return None
        return cls(units, takes_gradients_away=takes_gradients_away)
