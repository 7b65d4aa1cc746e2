"""State in memory: on the host, or kept on the compute device."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.offload.arena import HostArena
from boltmesh.strategies.offload.tiers import StateStore


class _MemoryStore(StateStore):
    """State that is stepped where it is kept, so acquiring and releasing are free."""

    def __init__(self) -> None:
        self._chunks: dict[int, tuple[Tensor, ...]] = {}

    @override
    def prefetch(self, chunk: int) -> None:
        pass

    @override
    def acquire(self, chunk: int) -> tuple[Tensor, ...]:
        return self._chunks[chunk]

    @override
    def release(self, chunk: int, *, is_dirty: bool, defers_write: bool = False) -> None:
        pass

    @override
    def flush(self) -> None:
        pass

    @override
    def close(self) -> None:
        self._chunks.clear()


class HostStore(_MemoryStore):
    """Optimizer state in host memory."""

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        """Keep state for steps on the host.

        Args:
            device: Where the model is computed. On CUDA the memory is locked for copies to it.
            num_bytes: What is to be stored, by ``bytes_of``.
        """
        super().__init__()
        self._arena = HostArena(device, num_bytes)

    @staticmethod
    def bytes_of(numel: int, num_tensors: int) -> int:
        """What a chunk takes, for whoever sizes the memory."""
        return num_tensors * HostArena.bytes_of(4 * numel)

    @override
    def create(self, chunk: int, tensors: Sequence[Tensor]) -> None:
        stored = tuple(self._arena.take(each.numel(), torch.float32) for each in tensors)
        for here, initial in zip(stored, tensors, strict=True):
            here.copy_(initial)
        self._chunks[chunk] = stored

    @override
    def close(self) -> None:
        super().close()
        self._arena = HostArena(self._arena.device)

    @override
    def bytes_by_place(self) -> dict[str, int]:
        return {"host": self._arena.num_bytes}


class DeviceStore(_MemoryStore):
    """Optimizer state that stays on the compute device: what ``offload_fraction`` leaves there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @override
    def create(self, chunk: int, tensors: Sequence[Tensor]) -> None:
        self._chunks[chunk] = tuple(
            torch.empty(each.shape, dtype=torch.float32, device=self._device).copy_(each)
            for each in tensors
        )

    @override
    def bytes_by_place(self) -> dict[str, int]:
        tensors = (each for chunk in self._chunks.values() for each in chunk)
        return {"device": sum(each.nbytes for each in tensors)}
