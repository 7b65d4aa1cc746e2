"""Keeps the buffers of all ranks those of the first one, as ``DistributedDataParallel`` does.

Every buffer is sent, masks and rotary tables that never change too: batch norm, codebooks and
averages are written without a trace in the tensor, so nobody can tell which have changed. What is
sent follows from the model alone, and so is the same on every rank.
"""

from collections.abc import Callable

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.strategies.torch_compat import broadcast_coalesced, buffers_of


class BufferSync:
    """The buffers of a module, on all ranks of a group.

    Args:
        module: The whole model.
        group: The ranks.
        holds: Whether these ranks have the model's value of a buffer, by its name; None: of all.
    """

    def __init__(
        self, module: Module, group: ProcessGroup, *, holds: Callable[[str], bool] | None = None
    ) -> None:
        self._module, self._group, self._holds = module, group, holds

    def held(self) -> list[Tensor]:
        """Return the buffers that ``send`` sends."""
        if self._holds is None:
            return buffers_of(self._module)
        return [each for name, each in self._module.named_buffers() if self._holds(name)]

    def send(self) -> None:
        """Send the first rank's buffers. Collective."""
        if self._group.size() == 1:
            return
        buffers = [each.detach() for each in self.held()]
        if buffers:
            broadcast_coalesced(buffers, self._group)
