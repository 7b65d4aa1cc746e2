"""One large piece of host memory, handed out in parts: a huge page is not spent on each of them."""

import torch
from torch import Tensor

from boltmesh.strategies.offload.memory import allocate_host, round_up

ALIGNMENT_BYTES = 64
"""A cache line: no two parts share one."""


class HostArena:
    """Hands out memory of an ``allocate_host`` that was made for all of it.

    Args:
        device: Where the data is computed with.
        num_bytes: What will be taken, as ``bytes_of`` counts it. More is allocated as it is asked
            for.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self.device = device
        self._rest: Tensor | None = None
        if num_bytes > 0:
            self._rest = allocate_host(num_bytes, device=device)
        self.num_bytes = num_bytes

    @staticmethod
    def bytes_of(num_bytes: int) -> int:
        """What a part takes."""
        return round_up(max(1, num_bytes), ALIGNMENT_BYTES)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros."""
        wanted = numel * dtype.itemsize
        taken = self.bytes_of(wanted)
        if self._rest is None or self._rest.numel() < taken:
            self._rest = allocate_host(taken, device=self.device)
            self.num_bytes += taken
        part, self._rest = self._rest[:wanted], self._rest[taken:]
        return part.view(dtype)
