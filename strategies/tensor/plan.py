"""What is divided over the tensor axis, and how: plain data, to be printed, sent and edited.

Which elements of a dimension each tensor rank keeps, and where they stand in the whole.

A dimension is a row of sections, one after the other: the q, k and v of a fused projection, the
gate and up of a gated MLP. Each section is a block of ``outer x count x inner`` elements, row by
row, of which ``count`` is what is divided: heads, with the channels of a head inside and, in the
layout of some models, (q, k, v) outside. A rank keeps its part of every section, so its shard is
again such a row of sections, with ``count / size`` in the place of ``count``. Only the tokens of a
vocabulary are divided where that is no whole number: the first ranks have one more.

Plain Python: a plan can be made and a checkpoint read where torch is not.

A plan as text: to send it from the rank that made it, to keep it, and to edit it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import msgspec

from boltmesh.errors import ConfigError


@dataclass(frozen=True)
class Section:
    """``outer x count x inner`` neighbouring elements, divided along ``count``."""

    outer: int
    count: int
    inner: int

    @property
    def length(self) -> int:
        """Elements."""
        return self.outer * self.count * self.inner

    def divided(self, size: int, rank: int = 0) -> "Section":
        """What one of ``size`` ranks keeps. Only where the count does not divide, ranks differ."""
        return Section(self.outer, balanced_share(self.count, size, rank)[1], self.inner)


def balanced_share(count: int, size: int, rank: int) -> tuple[int, int]:
    """Return where a rank's share of ``count`` begins, and how much it is.

    Where ``count`` does not divide, the first ranks have one more than the last.
    """
    each, left = divmod(count, size)
    return rank * each + min(rank, left), each + (rank < left)


@dataclass(frozen=True)
class ElementRange:
    """Neighbouring elements of the whole dimension that are neighbours in a shard too."""

    start: int
    """In the whole."""
    local_start: int
    """In the shard."""
    length: int


def runs(sections: Sequence[Section], size: int, rank: int) -> list[ElementRange]:
    """The elements of one rank's shard, in the order of the shard, neighbours joined.

    Args:
        sections: Of the whole dimension.
        size: Ranks that share it.
        rank: Whose shard.
    """
    joined: list[ElementRange] = []
    local = 0
    for start, length in _stretches(sections, size, rank):
        last = joined[-1] if joined else None
        if last is not None and last.start + last.length == start:
            joined[-1] = ElementRange(last.start, last.local_start, last.length + length)
        else:
            joined.append(ElementRange(start, local, length))
        local += length
    return joined


def _stretches(sections: Sequence[Section], size: int, rank: int) -> Iterator[tuple[int, int]]:
    """Start and length of each unbroken stretch that a rank keeps."""
    base = 0
    for section in sections:
        start, count = balanced_share(section.count, size, rank)
        for row in range(section.outer if count else 0):
            yield base + (row * section.count + start) * section.inner, count * section.inner
        base += section.length


Style = Literal["column", "row", "table", "vocabulary", "expert", "along"]
"""How a parameter takes part.

``column``: of a matrix product, whose outputs are divided; or the bias of one. ``row``: its inputs
are divided, and its outputs summed over the axis. ``table``: an embedding of which each rank has
some columns. ``vocabulary``: an embedding or a head of which each rank has some tokens. ``expert``:
stacked matrices of experts, divided inside each. ``along``: used element by element, or head by
head, together with something divided.
"""

Backend = Literal["local", "region", "replicated"]
"""How a kind of block is run. ``local``: on plain shards, whose sizes its code sees.
``region``: as DTensors between column and row, whose code sees the sizes of the whole.
``replicated``: whole on every rank."""


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of which each rank keeps a part."""

    name: str
    names: tuple[str, ...]
    """All names of a tied parameter, ``name`` first."""
    shape: tuple[int, ...]
    """Of the whole."""
    dim: int
    """Which is divided."""
    sections: tuple[Section, ...]
    """Of that dimension, in its order."""
    style: Style
    axis: int
    """Which of ``TensorPlan.axes``; parameters of one axis are divided together or not at all."""
    why: str = ""
    """In words for the table."""
    element_bytes: int = 4

    @property
    def length(self) -> int:
        """Of the divided dimension, whole."""
        return sum(section.length for section in self.sections)

    def local_shape(self, size: int, rank: int = 0) -> tuple[int, ...]:
        """Of one rank's shard. Ranks differ only where a vocabulary does not divide."""
        shape = list(self.shape)
        shape[self.dim] = sum(section.divided(size, rank).length for section in self.sections)
        return tuple(shape)

    @property
    def elements(self) -> int:
        """Of the whole."""
        return prod(self.shape)


@dataclass(frozen=True)
class PlannedDim:
    """A logical axis of the model that nothing needs whole, such as the heads of a block."""

    size: int
    """How many indivisible units it has: heads, channels, tokens."""
    parameters: tuple[str, ...]
    blocks: tuple[str, ...]
    """The repeated blocks that it lies in; empty for one outside of them."""


@dataclass(frozen=True)
class Unsharded:
    """A parameter that every rank keeps whole."""

    name: str
    why: str
    """The operator that needed it whole, or what does not divide; for the table."""
    shape: tuple[int, ...] = ()
    element_bytes: int = 4


@dataclass(frozen=True)
class SizeAttribute:
    """An integer on a module that its code divides shapes by, such as ``num_heads``."""

    module: str
    name: str
    value: int
    """Of the whole model."""


@dataclass(frozen=True)
class GatherPoint:
    """Where sequence parallelism needs the whole sequence: a module and one of its arguments."""

    module: str
    argument: int | str
    """Place or keyword."""


@dataclass(frozen=True)
class ExitPoint:
    """Which output of a module has the sequence."""

    module: str
    place: int | str | None
    """In a tuple or a mapping; None where the module gives one tensor."""


@dataclass(frozen=True)
class SequencePlan:
    """Where the sequence is divided: from the entry of a stack of blocks to its exit.

    A plan with one has its consequences in the other fields as well: parameters between blocks are
    ``partial``, dropouts there are local, and a gather takes the place of boundaries behind it.
    """

    stacks: tuple[tuple[str, str], ...]
    """First and last block of each."""
    gathers: tuple[GatherPoint, ...]
    dim: int = 1
    """Of the activations; ``[batch, sequence, channels]``."""
    entries: tuple[GatherPoint, ...] = ()
    """Of each stack: the argument of its first block that is divided."""
    exits: tuple[ExitPoint, ...] = ()
    """Of each stack: the output of its last block that is joined."""
    fed: tuple[str, ...] = ()
    """Modules with columns that a gather feeds: it sums their inputs' gradients, they do not."""
    plain_partial: tuple[str, ...] = ()
    """``TensorPlan.partial`` of the same plan with whole sequences; so the next two."""
    plain_boundaries: tuple[str, ...] = ()
    plain_local_dropouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorPlan:
    """What is divided over ``size`` ranks, and what that asks of the modules around it."""

    size: int
    axes: tuple[PlannedDim, ...] = ()
    sharded: dict[str, ShardedParameter] = field(default_factory=dict)
    """By first name, in the order of the model."""
    whole: tuple[Unsharded, ...] = ()
    partial: tuple[str, ...] = ()
    """Replicated parameters that meet something divided: each rank has a part of their gradient."""
    boundaries: tuple[str, ...] = ()
    """Modules whose replicated output meets something divided: its gradient is summed."""
    fed: tuple[str, ...] = ()
    """Modules with columns whose inputs come from boundaries, which sum the gradients of these."""
    local_dropouts: tuple[str, ...] = ()
    """Modules that draw for something divided: each rank draws its own."""
    attributes: tuple[SizeAttribute, ...] = ()
    """Candidates that the ``local`` backend may have to divide."""
    region_axes: tuple[int, ...] = ()
    """Axes that views name with sizes: those that ``region`` carries as DTensors."""
    sequence: SequencePlan | None = None
    """None where it is not possible, or was not asked for."""
    kinds: dict[str, str] = field(default_factory=dict)
    """The first block of its kind by name of every block; one that is missing is alone."""
    divides_logits: bool = True
    """Whether heads may be divided by tokens."""
    backends: dict[str, Backend] = field(default_factory=dict)
    """By kind of block (the name of its first), and for what lies in none, by the empty name;
    filled once it was proven."""
    notes: tuple[str, ...] = ()
    """Disagreements and fallbacks, in words for the table."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Operators without a rule, with how often they ran; what they touched stays whole."""


def to_json(plan: TensorPlan) -> str:
    """Return a plan as JSON."""
    return msgspec.json.encode(plan).decode()


def from_json(text: str | bytes) -> TensorPlan:
    """Return the plan that a text describes.

    Raises:
        ConfigError: When it describes none.
    """
    try:
        return msgspec.json.decode(text, type=TensorPlan)
    except msgspec.DecodeError as error:  # invalid values are among these
        raise ConfigError(
            f"this is no tensor plan: {error}. Make one with to_json(plan)."
        ) from None
