"""A rank's part of a tensor, and the pieces in which it is written.

``own_chunks`` and ``own_part`` describe any tensor: plain, a DTensor, or a shard that is kept on
the host or a disk (``OffloadedChunk``), which is read in full, one at a time, and written back.

``TensorPart`` is for a plain tensor that is a rank's part of a larger one. A tensor-parallel rank
keeps some heads of a fused projection: several ranges of the full tensor, contiguous in a plain
tensor. A checkpoint holds every range by its position in the full tensor, for any layout to read.
(A strided DTensor placement would not work: torch fails to save one, and loads wrong values into
one without an error.)

``Snapshot`` is a copy of a rank's part at one moment, for asynchronous saves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from typing_extensions import override

from boltmesh.errors import CheckpointError


class Snapshot(Tensor):
    """Stands for a full tensor in a checkpoint's dictionary, like ``TensorPart``, with a copy.

    It has the shape and dtype of the full tensor and no elements.
    """

    chunks: "list[OwnChunk]"
    """Blocks of the full tensor that the copy holds."""
    copied: Tensor | None
    """This rank's part in host memory; None if another rank writes the tensor."""

    @staticmethod
    def of(whole: Tensor, chunks: "list[OwnChunk]", copied: Tensor | None) -> "Snapshot":
        """Return the snapshot of ``whole``; ``copied`` holds its blocks ``chunks``, on the CPU."""
        made = torch.empty(whole.size(), dtype=whole.dtype, device="meta").as_subclass(Snapshot)
        made.requires_grad_(whole.requires_grad)
        made.chunks, made.copied = chunks, copied
        return made


class ElementStretch(NamedTuple):
    """Elements of a dim that are contiguous in the full tensor and in the part."""

    start: int
    """Index in the full dim."""
    local_start: int
    """Index in the part."""
    length: int


@dataclass(frozen=True)
class DimDivision:
    """The elements of a tensor that this rank keeps: some of one dim, all of the other dims."""

    shape: torch.Size
    """Shape of the full tensor."""
    dim: int
    stretches: tuple[ElementStretch, ...]
    """This rank's ranges of that dim, in the order of its part, which they fill without gaps."""

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's part."""
        length = sum(each.length for each in self.stretches)
        return torch.Size((*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]))

    def chunks(
        self, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[torch.Size, torch.Size, torch.Size]]:
        """Yield the contiguous blocks of the full tensor that make up a block of the part.

        Args:
            offsets: Offsets of the block in the part.
            sizes: Sizes of the block.

        Yields:
            Offsets in the full tensor, offsets in the block, and sizes.
        """
        begin, end = offsets[self.dim], offsets[self.dim] + sizes[self.dim]
        for start, local_start, length in self.stretches:
            first, last = max(begin, local_start), min(end, local_start + length)
            if first < last:
                yield (
                    self._at(offsets, start + first - local_start),
                    self._at([0] * len(offsets), first - begin),
                    self._at(sizes, last - first),
                )

    def _at(self, values: Sequence[int], value: int) -> torch.Size:
        return torch.Size((*values[: self.dim], value, *values[self.dim + 1 :]))

    def cut(self, whole: Tensor) -> Tensor:
        """Return a contiguous copy of this rank's part, ``local_shape``, of a full tensor."""
        pieces = [whole.narrow(self.dim, each.start, each.length) for each in self.stretches]
        return torch.cat(pieces, self.dim).contiguous()

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write a part of ``local_shape`` to its positions in a full tensor of ``shape``."""
        for start, local_start, length in self.stretches:
            piece = part.narrow(self.dim, local_start, length)
            whole.narrow(self.dim, start, length).copy_(piece)


class TensorPart(Tensor):
    """Stands for a full tensor in a checkpoint's dictionary, with the part that this rank holds.

    It has the shape and dtype of the full tensor and no elements. Hooks may rename it or drop it.
    """

    held: Tensor
    """This rank's tensor, perhaps a shard itself. Tensors computed from a part do not have it."""
    division: DimDivision

    @staticmethod
    def of(held: Tensor, division: DimDivision) -> "TensorPart":
        """Return a tensor of ``division.shape`` that stands for ``held``, of ``local_shape``."""
        made = torch.empty(division.shape, dtype=held.dtype, device="meta").as_subclass(TensorPart)
        made.requires_grad_(held.requires_grad)
        made.held, made.division = held, division
        return made

    def known(self) -> tuple[Tensor, DimDivision]:
        """Return this rank's tensor and the division.

        Raises:
            CheckpointError: If this was computed from a part and so has no value.
        """
        if not hasattr(self, "held"):
            raise CheckpointError(
                "on_save_checkpoint has computed something from a parameter of which this rank "
                "has a part, and there is no value to store. Store what you need of the whole in "
                "training, with gathered_parameters(...), under a key of your own."
            )
        return self.held, self.division

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorPart":
        return self  # it is immutable


PIECE_BYTES = 64 << 20
"""Larger shards are written in several pieces: a reader holds one at a time, and a rank that
needs a few rows of a large tensor does not read all of it."""


@runtime_checkable
class OffloadedChunk(Protocol):
    """A shard without storage of its own, as offload creates it."""

    def read(self) -> Tensor:
        """Return the value on the CPU, of the shard's shape; may be the stored tensor itself."""

    def write(self, value: Tensor) -> None:
        """Replace the value by one of the same shape."""


@runtime_checkable
class KeptInOrder(OffloadedChunk, Protocol):
    """One of many values that are stored in order."""

    @property
    def position(self) -> int:
        """Position in storage; values are read in this order, so that each page is read once."""


class OwnChunk(NamedTuple):
    """A contiguous block of a full tensor that this rank holds."""

    whole: ChunkStorageMetadata
    """Its offsets and sizes in the full tensor."""
    offsets: torch.Size
    """Indices of its first element in this rank's part."""


def own_chunks(tensor: Tensor) -> list[OwnChunk]:
    """Return the blocks of the full tensor that this rank holds."""
    if isinstance(tensor, Snapshot):
        return tensor.chunks
    if isinstance(tensor, TensorPart):
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
    """Return this rank's part of a tensor: the tensor itself unless it is distributed."""
    if isinstance(tensor, Snapshot):
        assert tensor.copied is not None
        return tensor.copied
    if isinstance(tensor, TensorPart):
        return own_part(tensor.known()[0])
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor.detach()


def split(chunk: ChunkStorageMetadata, element_bytes: int) -> Iterator[ChunkStorageMetadata]:
    """Divide a chunk along its first dim into pieces of about ``PIECE_BYTES``."""
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
    """Return the block of a tensor with these offsets and sizes, a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if tensor.size(dim) != size:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def within(chunk: OwnChunk, piece: ChunkStorageMetadata) -> torch.Size | None:
    """Return the indices of a piece's first element in this rank's part; None if outside of it."""
    inner = [one - other for one, other in zip(piece.offsets, chunk.whole.offsets, strict=True)]
    ends = zip(inner, piece.sizes, chunk.whole.sizes, strict=True)
    if not all(at >= 0 and at + size <= end for at, size, end in ends):
        return None
    return _sum(chunk.offsets, torch.Size(inner))
