"""The part of a tensor that this rank holds, and the pieces that it is written in.

A shard may be an ordinary tensor on a device or may be kept on the host or a disk; the latter is
read whole, one at a time, and written back whole.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

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


def own_chunk(tensor: Tensor) -> ChunkStorageMetadata:
    """Which part of the whole tensor this rank holds; of no elements where it holds nothing."""
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        assert isinstance(chunk, ChunkStorageMetadata)
        return chunk
    return ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the tensor itself unless it is distributed."""
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


def relative(offsets: torch.Size, base: torch.Size) -> torch.Size:
    """Offsets within a chunk that itself begins at ``base``."""
    return torch.Size(one - other for one, other in zip(offsets, base, strict=True))
