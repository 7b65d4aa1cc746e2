"""What the planner knows of a model: the shapes of its tensors, by the unit that gathers them.

A description comes from arithmetic for a model that is known (``gpt.py``), or from the module
itself, built without memory; the estimates do not care which.
"""

from dataclasses import dataclass, replace
from math import prod


@dataclass(frozen=True)
class TensorShape:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    is_trained: bool = True
    element_bytes: int = 4
    """As the model builds it."""
    layers: tuple[str, ...] = ()
    """What computes with it and could gather it in tiles: ``product`` for a Linear, ``lookup`` for
    an Embedding; several where it is tied."""
    is_multiplied: bool = False
    """Read by a matrix product, for which autocast makes and keeps a copy unless the parameter is
    gathered in what autocast computes in."""

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return prod(self.shape)

    def is_larger_than(self, num_bytes: int) -> bool:
        """Whether it is gathered in tiles of so many bytes."""
        return bool(self.layers) and self.numel * self.element_bytes > num_bytes

    def padded_numel(self, num_shards: int) -> int:
        """Elements of a shard with its padding: ``fully_shard`` cuts rows, ceil(rows / shards)."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // num_shards) * (self.numel // rows if rows else 0)

    def shard_numel(self, num_shards: int, rank: int = 0) -> int:
        """Elements of the shard of one rank, which for the last ranks are fewer, or none."""
        rows = self.shape[0] if self.shape else 1
        each = -(-rows // num_shards)
        mine = min(each, max(0, rows - rank * each))
        return mine * (self.numel // rows if rows else 0)


@dataclass(frozen=True)
class UnitShape:
    """Parameters that are gathered, and whose gradients are reduced, in one collective."""

    name: str
    """Dotted name of the module; empty for what no unit below the root owns."""
    tensors: tuple[TensorShape, ...]
    is_autocast: bool = True
    """Gathered in what autocast computes in, where there is autocast; else as it is stored."""
    stays_gathered: bool = False
    """Not freed between forward and backward pass in stage 3: the root."""
    tile_bytes: int | None = None
    """The unit is one weight that is gathered in tiles of so many bytes, as it is stored."""

    @property
    def numel(self) -> int:
        """Elements of the whole unit."""
        return sum(each.numel for each in self.tensors)

    @property
    def trained_numel(self) -> int:
        """Elements that get gradients."""
        return sum(each.numel for each in self.tensors if each.is_trained)

    def padded_numel(self, num_shards: int, *, trained: bool = False) -> int:
        """Elements of one rank's padded shards, of all tensors or of the trained ones."""
        return sum(
            each.padded_numel(num_shards) for each in self.tensors if each.is_trained or not trained
        )


@dataclass(frozen=True)
class Activations:
    """What a forward pass of one micro-batch leaves for its backward pass, on one rank."""

    saved_bytes: int
    """Kept until the backward pass; parameters and casts of them are not counted."""
    transient_bytes: int
    """Largest temporary results of the backward pass on top of that."""
    how: str
    """How this is known, in words."""


@dataclass(frozen=True)
class ModelShape:
    """A model as the planner sees it."""

    name: str
    units: tuple[UnitShape, ...]
    """In the order of the forward pass; the root last."""
    buffer_bytes: int = 0
    activations: Activations | None = None
    """None where nobody could tell."""
    forward_flops: int | None = None
    """Of the matrix products of one micro-batch on one rank, forward only."""
    reads_gradients: bool = False
    """Whether its hooks may look at gradients between backward pass and step."""
    keeps_gradients: bool = False
    """Whether it zeroes gradients by code of its own, or looks at them before they are."""

    def step_flops(self, num_microbatches: int) -> int | None:
        """Floating-point operations of an optimizer step; backward costs twice as much again."""
        return None if self.forward_flops is None else 3 * num_microbatches * self.forward_flops

    def in_tiles(self, tile_bytes: int | None) -> "ModelShape":
        """Return the model with every weight that is larger than this as a unit of its own."""
        if tile_bytes is None:
            return self
        units: list[UnitShape] = []
        for unit in self.units:
            if unit.tile_bytes is not None:
                units.append(unit)
                continue
            tiled = [each for each in unit.tensors if each.is_larger_than(tile_bytes)]
            rest = tuple(each for each in unit.tensors if each not in tiled)
            units += [UnitShape(each.name, (each,), tile_bytes=tile_bytes) for each in tiled]
            units.append(replace(unit, tensors=rest))
        return replace(self, units=tuple(units))

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(each.numel for each in self.units)

    @property
    def trained_numel(self) -> int:
        """Elements of the trained ones."""
        return sum(each.trained_numel for each in self.units)
