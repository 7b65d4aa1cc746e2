"""Carries stepped parameters from their chunks to the stores that all-gathers read."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from boltmesh.strategies.offload.buckets import Bucket, Chunk, Slot
from boltmesh.strategies.offload.parameters import MemoryParameterStore
from boltmesh.strategies.offload.rule import PieceGradient

if TYPE_CHECKING:
    from boltmesh.strategies.offload.tiers import ParameterStore


class ParameterCopies:
    """Knows which store has the compute copy of which parameter."""

    def __init__(self) -> None:
        self.stores: dict[Slot, ParameterStore] = {}
        self._staged: dict[Slot, tuple[Tensor, set[int]]] = {}

    def is_written_once(self, bucket: Bucket) -> bool:
        """Whether each chunk must be stepped exactly once a step.

        A store that takes whole shards only gets one that several chunks hold when the last of
        them has been stepped.
        """
        return any(self._is_staged(bucket, slot) for slot in bucket.slots)

    def update(self, chunk: Chunk, values: Tensor, pieces: Sequence[PieceGradient]) -> None:
        """Copy the parameters that were stepped out of a chunk, which may be reused afterwards.

        Args:
            chunk: The chunk.
            values: Its first tensor.
            pieces: What was stepped.
        """
        used: set[MemoryParameterStore] = set()
        for each in pieces:
            slot, start, stop = each.piece.slot, each.piece.start, each.piece.stop
            store = self.stores[slot]
            part = values[start - chunk.start : stop - chunk.start]
            if isinstance(store, MemoryParameterStore):
                store.put_part(slot.index, start - slot.offset, part)
                used.add(store)
            elif self._is_staged(chunk.bucket, slot):
                self._stage(chunk, slot, start, part)
            else:
                begin = slot.offset - chunk.start
                store.put(slot.index, values[begin : begin + slot.padded_numel])
        for store in used:
            store.settle()

    def _is_staged(self, bucket: Bucket, slot: Slot) -> bool:
        # With its padding, which may reach into a chunk that holds nothing else of it.
        first = bucket.chunks_of(slot)[:1]
        is_whole = all(slot.offset + slot.padded_numel <= chunk.stop for chunk in first)
        return not is_whole and not isinstance(self.stores[slot], MemoryParameterStore)

    def _stage(self, chunk: Chunk, slot: Slot, start: int, part: Tensor) -> None:
        if slot not in self._staged:
            self._staged[slot] = torch.zeros(slot.padded_numel, dtype=slot.dtype), set()
        whole, done = self._staged[slot]
        begin = start - slot.offset
        whole[begin : begin + part.numel()].copy_(part)
        done.add(chunk.number)
        if len(done) == len(chunk.bucket.chunks_of(slot)):
            self.stores[slot].put(slot.index, whole)
            del self._staged[slot]
