"""What stands behind an ``OffloadedShard`` of the engine: a stretch of a bucket in its chunks."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.strategies.offload.buckets import Bucket, Slot
from boltmesh.strategies.offload.shard import GatheredSource, ShardSource
from boltmesh.strategies.offload.tiers import ParameterStore


class Settling(Protocol):
    """The part of the engine that sources need."""

    is_lost: bool
    """Whether what is kept is to be forgotten, after a step that failed."""

    def settle(self, bucket: Bucket) -> None:
        """Return when no step of the bucket is pending, nor guessed."""

    def rest(self, bucket: Bucket) -> None:
        """Return when nothing at all is pending: stores of state serve one thread at a time."""

    def begin_gathering(self) -> None:
        """Somebody is about to gather parameters."""


class StateSource(ShardSource):
    """One tensor of the state of one parameter."""

    def __init__(
        self, engine: Settling, bucket: Bucket, slot: Slot, number: int, name: str
    ) -> None:
        """Stand for a stretch of state.

        Args:
            engine: Is asked to let pending steps end first.
            bucket: Holds the parameter.
            slot: The parameter.
            number: Which of a chunk's tensors; the parameter itself is 0.
            name: For messages.
        """
        self._engine = engine
        self._bucket = bucket
        self._slot = slot
        self._number = number
        self.name = name
        self.position = slot.index

    @override
    def read(self) -> Tensor:
        self._engine.rest(self._bucket)
        slot = self._slot
        if self._engine.is_lost:
            return torch.full(slot.shape, torch.nan, dtype=torch.float32)
        value = torch.empty(slot.numel, dtype=torch.float32)
        self._visit(lambda stored, here: value[here].copy_(stored), is_dirty=False)
        return value.view(slot.shape)

    @override
    def write(self, value: Tensor) -> None:
        self._engine.rest(self._bucket)
        flat = value.detach().reshape(-1).to("cpu")
        self._visit(lambda stored, here: stored.copy_(flat[here]), is_dirty=True)

    def _visit(self, do: Callable[[Tensor, slice], object], *, is_dirty: bool) -> None:
        slot = self._slot
        for chunk in self._bucket.chunks_of(slot):
            assert chunk.store is not None
            stored = chunk.store.acquire(chunk.number)[self._number]
            try:
                start = max(slot.offset, chunk.start)
                stop = min(slot.offset + slot.numel, chunk.stop)
                do(
                    stored[start - chunk.start : stop - chunk.start],
                    slice(start - slot.offset, stop - slot.offset),
                )
            finally:
                # Loaders write tensor by tensor, and a chunk holds those of many parameters.
                chunk.store.release(chunk.number, is_dirty=is_dirty, defers_write=True)


class ParameterSource(StateSource, GatheredSource):
    """The master parameter, and beside it the copy that is gathered."""

    def __init__(self, engine: Settling, bucket: Bucket, slot: Slot, store: ParameterStore) -> None:
        super().__init__(engine, bucket, slot, 0, slot.name)
        self._store = store
        self._num_fetched = 0

    @override
    def write(self, value: Tensor) -> None:
        super().write(value)
        padded = torch.zeros(self._slot.padded_numel, dtype=torch.float32)
        padded[: self._slot.numel].copy_(value.detach().reshape(-1))
        self._store.put(self._slot.index, padded)

    @override
    def fetch(self) -> Tensor:
        self._engine.begin_gathering()
        self._engine.settle(self._bucket)
        shard = self._store.get(self._slot.index)
        self._num_fetched += 1
        return shard.view(self._slot.padded_shape)

    @override
    def release(self) -> None:
        self._num_fetched -= 1
        self._store.release(self._slot.index)

    def abandon(self) -> None:
        """Release what was fetched for a gather that nobody waited for."""
        while self._num_fetched:
            self.release()

    @override
    def fetch_part(self, start: int, stop: int) -> Tensor:
        self._engine.begin_gathering()
        self._engine.settle(self._bucket)
        return self._store.get_part(self._slot.index, start, stop)
