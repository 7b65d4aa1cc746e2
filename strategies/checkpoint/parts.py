"""A plain tensor that is a rank's part of a larger one, told to who writes and reads checkpoints.

A tensor-parallel rank keeps some heads of a fused projection: several stretches of the whole, side
by side in a tensor that knows nothing of it. A checkpoint holds every stretch where it lies in the
whole, as the model's author wrote it, so that any layout reads it. (An explicit strided placement
would do neither: torch fails to save one, and loads wrong values into one without a word.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from boltmesh.errors import CheckpointError


class Stretch(NamedTuple):
    """Neighbours in the whole dimension that are neighbours in the part too."""

    start: int
    """In the whole."""
    local_start: int
    """In the part."""
    length: int


@dataclass(frozen=True)
class Division:
    """Which elements of a tensor this rank keeps: some of one dimension, all of the others."""

    shape: torch.Size
    """Of the whole."""
    dim: int
    stretches: tuple[Stretch, ...]
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


class Part(Tensor):
    """Stands for a whole tensor in a checkpoint's dictionary, and knows what this rank has of it.

    It has the shape and dtype of the whole and no elements. Hooks may rename it or drop it.
    """

    held: Tensor
    """What this rank has; maybe itself a shard. Missing from what computing makes of a part."""
    division: Division

    @staticmethod
    def of(held: Tensor, division: Division) -> "Part":
        """The part ``held`` of a tensor that is divided so."""
        made = torch.empty(division.shape, dtype=held.dtype, device="meta").as_subclass(Part)
        made.requires_grad_(held.requires_grad)
        made.held, made.division = held, division
        return made

    def known(self) -> tuple[Tensor, Division]:
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
    def __deepcopy__(self, memo: dict[int, Any]) -> "Part":
        return self  # nothing about it can change
