"""Keeps the buffers of all ranks those of the first one, as ``DistributedDataParallel`` does.

DDP sends every buffer before every forward pass. Most never change (masks, rotary tables), so here
only those go that were written since they were last sent, and running statistics: torch's batch
norm writes these without a trace in the tensor.
"""

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.strategies.torch_compat import broadcast_coalesced, times_written

_STATISTICS = "running_"
"""How the names of running statistics begin, in torch and by custom."""


class BufferSync:
    """Knows the buffers of a module as they were when the ranks last had them alike."""

    def __init__(self, module: Module, group: ProcessGroup) -> None:
        self._module, self._group = module, group
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self.mark()

    def mark(self) -> None:
        """Take the buffers for alike on all ranks now."""
        self._seen = {
            name: (each, times_written(each)) for name, each in self._module.named_buffers()
        }

    def send(self) -> None:
        """Send the first rank's buffers, those that were written or replaced. Collective.

        Ranks run the same code and write the same buffers, whatever the values.
        """
        if self._group.size() == 1:
            return
        written = [
            each.detach() for name, each in self._module.named_buffers() if self._is_new(name, each)
        ]
        if written:
            broadcast_coalesced(written, self._group)
            self.mark()

    def _is_new(self, name: str, buffer: Tensor) -> bool:
        if _is_statistic(name):
            return True
        known, version = self._seen.get(name, (None, 0))
        return buffer is not known or times_written(buffer) != version


def statistics_bytes(module: Module) -> int:
    """Return the bytes of running statistics and of the counters beside them."""
    return sum(
        buffer.numel() * buffer.element_size()
        for each in module.modules()
        if any(_is_statistic(name) for name, _ in each.named_buffers(recurse=False))
        for buffer in each.buffers(recurse=False)
    )


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2].startswith(_STATISTICS)
