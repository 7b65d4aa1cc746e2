"""Keeps the buffers of all ranks those of the first one, as ``DistributedDataParallel`` does.

Every buffer is sent, masks and rotary tables that never change too: batch norm, codebooks and
averages are written without a trace in the tensor, so nobody can tell which have changed. What is
sent follows from the model alone, and so is the same on every rank.
"""

from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.strategies.torch_compat import broadcast_coalesced, buffers_of


class BufferSync:
    """The buffers of a module, on all ranks of a group."""

    def __init__(self, module: Module, group: ProcessGroup) -> None:
        self._module, self._group = module, group

    def send(self) -> None:
        """Send the first rank's buffers. Collective."""
        if self._group.size() == 1:
            return
        buffers = [each.detach() for each in buffers_of(self._module)]
        if buffers:
            broadcast_coalesced(buffers, self._group)
