"""Storages that do not exist yet, and tensors that show parts of them."""

from dataclasses import dataclass

import torch
from torch import Tensor


class Content(dict[int, Tensor]):
    """Storages of a replay that exist at the moment: a tensor that owns the storage, by number.

    One that is asked for before anything was written to it, is made, with nothing in it.
    """

    def __init__(self, spaces: "list[Space]") -> None:
        super().__init__()
        self._spaces = spaces

    def __missing__(self, number: int) -> Tensor:
        space = self._spaces[number]
        made = torch.empty(space.num_bytes, dtype=torch.uint8, device=space.home)
        return self.setdefault(number, made)


@dataclass(frozen=True)
class Space:
    """A storage that does not exist."""

    home: torch.device
    """Where it would be."""
    num_bytes: int


@dataclass(frozen=True)
class Geometry:
    """Which elements of a storage a tensor shows."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        """The geometry of any tensor."""
        offset = int(tensor.storage_offset())
        return cls(tuple(tensor.size()), tuple(tensor.stride()), offset, tensor.dtype)


@dataclass(frozen=True)
class View:
    """A deferred tensor as an operator saw it."""

    storage: int
    geometry: Geometry

    def of(self, content: Content) -> Tensor:
        """The same view of the storage that now exists."""
        owner = content[self.storage]
        shape = self.geometry
        empty = torch.empty(0, dtype=shape.dtype, device=owner.device)
        return empty.set_(owner.untyped_storage(), shape.offset, shape.size, shape.stride)


def covers_storage(tensor: Tensor) -> bool:
    """Whether a tensor shows every element of its storage, each once."""
    expected = 1
    for step, length in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if length != 1 and step != expected:
            return False
        expected *= length
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
