"""One range of host memory that buffers of any size are cut from and given back to."""

from torch import Tensor


class Arena:
    """First fit over the free ranges of one tensor; neighbours that are free become one.

    Args:
        memory: ``uint8``, page-aligned; only whole pages are asked for.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._free = {0: memory.numel()} if memory.numel() else {}

    @property
    def num_bytes(self) -> int:
        """How much there is, free or not."""
        return self._memory.numel()

    def take(self, num_bytes: int) -> Tensor | None:
        """A part of the memory, or None when no free range is long enough."""
        for start in sorted(self._free):
            length = self._free[start]
            if length >= num_bytes:
                del self._free[start]
                if length > num_bytes:
                    self._free[start + num_bytes] = length - num_bytes
                return self._memory[start : start + num_bytes]
        return None

    def give_back(self, part: Tensor) -> None:
        """Free what ``take`` gave."""
        start = part.data_ptr() - self._memory.data_ptr()
        end = start + part.numel()
        end += self._free.pop(end, 0)
        for before, length in self._free.items():
            if before + length == start:
                self._free[before] = end - before
                return
        self._free[start] = end - start

    def owns(self, part: Tensor) -> bool:
        """Whether ``take`` gave this."""
        return 0 <= part.data_ptr() - self._memory.data_ptr() < self._memory.numel()
