"""Layout of a unit's parameters in flat state: slots in a bucket, a bucket cut into chunks.

The layout is that of the reduce-scatter output of ``fully_shard``: the shards of a unit's
parameters one after the other, each padded to ``ceil(rows / ranks)`` rows. A gradient then lies as
its state does, and one kernel call steps many parameters. Padding has zero gradient, so it changes
neither norm nor state.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn import Parameter

from boltmesh.strategies.offload.store_api import StateStore


@dataclass(eq=False)
class Slot:
    """One parameter's place in its bucket."""

    index: int
    """Number among all parameters of the engine; their key in the parameter stores."""
    name: str
    parameter: Parameter
    shape: tuple[int, ...]
    """Shape of this rank's shard."""
    padded_shape: tuple[int, ...]
    """Shape of the largest rank's shard, which all-gathers take from every rank."""
    dtype: torch.dtype
    """Dtype that it is computed in."""
    offset: int = 0
    """Start in the bucket, in elements."""
    is_counted: bool = True
    """Whether this rank counts its gradient in norms over all ranks."""
    has_copies: bool = False
    """Whether other ranks keep, and step, the same shard."""

    @property
    def numel(self) -> int:
        """Elements of this rank's shard."""
        return math.prod(self.shape)

    @property
    def padded_numel(self) -> int:
        """Elements that it occupies in the bucket."""
        return math.prod(self.padded_shape)


@dataclass(eq=False)
class BucketChunk:
    """A range ``start:stop`` of a bucket's elements that is read, stepped and written as one."""

    number: int
    bucket: "Bucket"
    start: int
    stop: int
    place: str = ""
    store: StateStore | None = None

    @property
    def numel(self) -> int:
        """Elements of each of its tensors."""
        return self.stop - self.start

    def pieces(self) -> Iterator["Piece"]:
        """Yield the ranges of parameters in the chunk, without padding."""
        for slot in self.bucket.slots:
            start = max(slot.offset, self.start)
            stop = min(slot.offset + slot.numel, self.stop)
            if start < stop:
                yield Piece(slot, start, stop)


@dataclass(frozen=True)
class Piece:
    """A range of one parameter; ``start`` and ``stop`` count elements of its bucket."""

    slot: Slot
    start: int
    stop: int


@dataclass(eq=False)
class Bucket:
    """The parameters of one unit that one optimizer updates."""

    name: str
    slots: list[Slot]
    chunks: list[BucketChunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        offset = 0
        for slot in self.slots:
            slot.offset = offset
            offset += slot.padded_numel
        self.numel = offset

    def cut(self, first_number: int, chunk_numel: int) -> None:
        """Cut into chunks: between parameters where possible, within those that are larger."""
        starts = [0]
        for slot in self.slots:
            end = slot.offset + slot.padded_numel
            if end - starts[-1] <= chunk_numel:
                continue
            if slot.offset > starts[-1]:
                starts.append(slot.offset)
            while end - starts[-1] > chunk_numel:
                starts.append(starts[-1] + chunk_numel)
        bounds = [*starts, self.numel]
        self.chunks = [
            BucketChunk(first_number + i, self, start, stop)
            for i, (start, stop) in enumerate(itertools.pairwise(bounds))
            if stop > start
        ]

    def host_offsets(self) -> dict[BucketChunk, int]:
        """Return where each chunk's gradients begin in the host buffer, in elements.

        Chunks that are kept on the device have none.
        """
        offsets: dict[BucketChunk, int] = {}
        end = 0
        for chunk in self.chunks:
            if chunk.place != "device":
                offsets[chunk] = end
                end += chunk.numel
        return offsets

    def chunks_of(self, slot: Slot) -> list[BucketChunk]:
        """Return the chunks that hold a part of a parameter."""
        end = slot.offset + slot.numel
        return [each for each in self.chunks if each.start < end and each.stop > slot.offset]
