"""The part of a tensor that this rank holds, and the pieces that it is written in.

A shard may be an ordinary tensor on a device or may be kept on the host or a disk; the latter is
read whole, one at a time, and written back whole.

What a rank has of a tensor at one moment, for a save that goes on beside training.

A plain tensor that is a rank's part of a larger one, told to who writes and reads checkpoints.

A tensor-parallel rank keeps some heads of a fused projection: several stretches of the whole, side
by side in a tensor that knows nothing of it. A checkpoint holds every stretch where it lies in the
whole, as the model's author wrote it, so that any layout reads it. (An explicit strided placement
would do neither: torch fails to save one, and loads wrong values into one without a word.)
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
    """Stands for a whole tensor in a checkpoint's dictionary, like ``Part``, with a copy.

    It has the shape and dtype of the whole and no elements.
    """

    chunks: "list[OwnChunk]"
    """Which blocks of the whole the copy has."""
    copied: Tensor | None
    """This rank's part in host memory; None where another rank writes the tensor."""

    @staticmethod
    def of(whole: Tensor, chunks: "list[OwnChunk]", copied: Tensor | None) -> "Snapshot":
        """Return what stands for ``whole``, whose blocks ``chunks`` are in ``copied``."""
        made = torch.empty(whole.size(), dtype=whole.dtype, device="meta").as_subclass(Snapshot)
        made.requires_grad_(whole.requires_grad)
        made.chunks, made.copied = chunks, copied
        return made


class ElementStretch(NamedTuple):
    """Neighbours in the whole dimension that are neighbours in the part too."""

    start: int
    """In the whole."""
    local_start: int
    """In the part."""
    length: int


@dataclass(frozen=True)
class DimDivision:
    """Which elements of a tensor this rank keeps: some of one dimension, all of the others."""

    shape: torch.Size
    """Of the whole."""
    dim: int
    stretches: tuple[ElementStretch, ...]
    """Of this rank, in the order of its part, which they fill without a gap."""

    @cached_property
    def local_shape(self) -> torch.Size:
        """Of this rank's part."""
        length = sum(each.length for each in self.stretches)
        return torch.Size((*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]))

    def chunks(
        self, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[torch.Size, torch.Size, torch.Size]]:
        """Give where a block of the part lies in the whole: unbroken blocks of it.

        Args:
            offsets: Of the block in the part.
            sizes: Of the block.

        Yields:
            Offsets in the whole, offsets in the block, and sizes.
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
        """Return this rank's part of a whole tensor, contiguous and in memory of its own."""
        pieces = [whole.narrow(self.dim, each.start, each.length) for each in self.stretches]
        return torch.cat(pieces, self.dim).contiguous()

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write a rank's part into its places in a whole tensor."""
        for start, local_start, length in self.stretches:
            piece = part.narrow(self.dim, local_start, length)
            whole.narrow(self.dim, start, length).copy_(piece)


class TensorPart(Tensor):
    """Stands for a whole tensor in a checkpoint's dictionary, and knows what this rank has of it.

    It has the shape and dtype of the whole and no elements. Hooks may rename it or drop it.
    """

    held: Tensor
    """What this rank has; maybe itself a shard. Missing from what computing makes of a part."""
    division: DimDivision

    @staticmethod
    def of(held: Tensor, division: DimDivision) -> "TensorPart":
        """The part ``held`` of a tensor that is divided so."""
        made = torch.empty(division.shape, dtype=held.dtype, device="meta").as_subclass(TensorPart)
        made.requires_grad_(held.requires_grad)
        made.held, made.division = held, division
        return made

    def known(self) -> tuple[Tensor, DimDivision]:
        """What this rank has, and of which whole.

        Raises:
            CheckpointError: When this was computed from a part, and so has no value.
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
        return self  # nothing about it can change


PIECE_BYTES = 64 << 20
"""Larger shards are written in several pieces: a reader holds one at a time, and a rank that
needs a few rows of a large tensor does not read all of it."""


@runtime_checkable
class OffloadedChunk(Protocol):
    """A shard without storage of its own, as offloading makes them."""

    def read(self) -> Tensor:
        """The value on the CPU, which may be the stored value itself."""

    def write(self, value: Tensor) -> None:
        """Replace the value."""


@runtime_checkable
class KeptInOrder(OffloadedChunk, Protocol):
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
    """What this rank holds of a tensor: the tensor itself unless it is distributed."""
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
