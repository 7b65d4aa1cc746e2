"""The part of a tensor that this rank holds, and the pieces that it is written in.

A shard may be an ordinary tensor on a device or may be kept on the host or a disk; the latter is
read whole, one at a time, and written back whole.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from boltmesh.strategies.checkpoint.parts import Part
from boltmesh.strategies.checkpoint.snapshot import Snapshot

PIECE_BYTES = 64 << 20
"""Larger shards are written in several pieces: a reader holds one at a time, and a rank that
needs a few rows of a large tensor does not read all of it."""


@runtime_checkable
class KeptElsewhere(Protocol):
    """A shard without storage of its own, as offloading makes them."""

    def read(self) -> Tensor:
        """The value on the CPU, which may be the stored value itself."""

    def write(self, value: Tensor) -> None:
        """Replace the value."""


@runtime_checkable
class KeptInOrder(KeptElsewhere, Protocol):
    """One of many that are stored next to each other."""

    @property
    def position(self) -> int:
        """What is read in this order is read from each place once."""


class OwnChunk(NamedTuple):
    """An unbroken block of a whole tensor that this rank holds."""

    whole: ChunkStorageMetadata
    """Where it lies in the whole."""
    offsets: torch.Size
    """Where it begins in this rank's part."""


def own_chunks(tensor: Tensor) -> list[OwnChunk]:
    """Which blocks of the whole tensor this rank holds."""
    if isinstance(tensor, Snapshot):
        return tensor.chunks
    if isinstance(tensor, Part):
        held, division = tensor.known()
        return [
            OwnChunk(ChunkStorageMetadata(whole, sizes), _sum(chunk.offsets, inner))
            for chunk in own_chunks(held)
            for whole, inner, sizes in division.chunks(chunk.whole.offsets, chunk.whole.sizes)
            if 0 not in sizes
        ]
    if not isinstance(tensor, DTensor):
        return [OwnChunk(ChunkStorageMetadata(_zeros(tensor), tensor.size()), _zeros(tensor))]
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    assert isinstance(chunk, ChunkStorageMetadata)
    return [OwnChunk(chunk, _zeros(tensor))]


def _zeros(tensor: Tensor) -> torch.Size:
    return torch.Size([0] * tensor.dim())


def _sum(one: torch.Size, other: torch.Size) -> torch.Size:
    return torch.Size(left + right for left, right in zip(one, other, strict=True))


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the tensor itself unless it is distributed."""
    if isinstance(tensor, Snapshot):
        assert tensor.copied is not None
        return tensor.copied
    if isinstance(tensor, Part):
        return own_part(tensor.known()[0])
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor.detach()


def split(chunk: ChunkStorageMetadata, element_bytes: int) -> Iterator[ChunkStorageMetadata]:
    """Cut a chunk along its first dimension into pieces of about ``PIECE_BYTES``."""
    if not chunk.sizes or not prod(chunk.sizes):
        yield chunk
        return
    row_bytes = element_bytes * prod(chunk.sizes[1:])
    rows = max(1, PIECE_BYTES // row_bytes)
    for start in range(0, chunk.sizes[0], rows):
        count = min(rows, chunk.sizes[0] - start)
        yield replace(
            chunk,
            offsets=torch.Size((chunk.offsets[0] + start, *chunk.offsets[1:])),
            sizes=torch.Size((count, *chunk.sizes[1:])),
        )


def narrow(tensor: Tensor, offsets: torch.Size, sizes: torch.Size) -> Tensor:
    """The part of a tensor that begins at ``offsets``; a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if tensor.size(dim) != size:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def within(chunk: OwnChunk, piece: ChunkStorageMetadata) -> torch.Size | None:
    """Where a piece begins in this rank's part; None for one that does not lie in the chunk."""
    inner = [one - other for one, other in zip(piece.offsets, chunk.whole.offsets, strict=True)]
    ends = zip(inner, piece.sizes, chunk.whole.sizes, strict=True)
    if not all(at >= 0 and at + size <= end for at, size, end in ends):
        return None
    return _sum(chunk.offsets, torch.Size(inner))
