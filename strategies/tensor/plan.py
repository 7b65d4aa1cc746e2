"""The tensor plan: which parameters are divided over the axis, and how. Plain data, no torch.

A ``TensorPlan`` can be printed, sent as JSON and edited; a plan can be made and a checkpoint read
without torch.

A divided dimension is a row of ``Section``, one after the other: the q, k and v of a fused
projection, the gate and up of a gated MLP. Each section is a block of ``outer x count x inner``
elements, row by row, of which ``count`` is divided: heads, with the channels of a head inside and,
in some models, (q, k, v) outside. A rank keeps its part of every section, so its shard is again a
row of sections, with ``count / size`` in place of ``count``. Only the tokens of a vocabulary may be
divided
unevenly: the first ranks have one more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import msgspec

from boltmesh.errors import ConfigError


@dataclass(frozen=True)
class Section:
    """``outer x count x inner`` contiguous elements, divided along ``count``."""

    outer: int
    count: int
    inner: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.outer * self.count * self.inner

    def divided(self, size: int, rank: int = 0) -> "Section":
        """Part of one of ``size`` ranks. Ranks differ only if the count does not divide evenly."""
        return Section(self.outer, balanced_share(self.count, size, rank)[1], self.inner)


def balanced_share(count: int, size: int, rank: int) -> tuple[int, int]:
    """Return the start and size of a rank's share of ``count``.

    If ``count`` does not divide evenly, the first ranks have one more than the last.
    """
    each, left = divmod(count, size)
    return rank * each + min(rank, left), each + (rank < left)


@dataclass(frozen=True)
class ElementRange:
    """Elements that are contiguous in the full dimension and in a shard."""

    start: int
    """Index in the full dimension."""
    local_start: int
    """Index in the shard."""
    length: int


def runs(sections: Sequence[Section], size: int, rank: int) -> list[ElementRange]:
    """Return the elements of one rank's shard, in its order, contiguous ranges merged.

    Args:
        sections: Sections of the full dimension.
        size: Ranks that share it.
        rank: Rank of the shard.
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
    """Start and length of each contiguous range that a rank keeps."""
    base = 0
    for section in sections:
        start, count = balanced_share(section.count, size, rank)
        for row in range(section.outer if count else 0):
            yield base + (row * section.count + start) * section.inner, count * section.inner
        base += section.length


Style = Literal["column", "row", "table", "vocabulary", "expert", "along"]
"""How a parameter is divided.

``column``: weight of a matrix product whose outputs are divided, or its bias. ``row``: its inputs
are divided, and its outputs are summed over the axis. ``table``: an embedding; each rank has some
columns. ``vocabulary``: an embedding or a head; each rank has some tokens. ``expert``: stacked
matrices of experts, each divided inside. ``along``: used element by element, or head by head,
together with something divided.
"""

LossParallel = Literal["auto"] | bool
"""``True``: what needs whole logits is refused. ``"auto"``: it gathers them, which is told once.
``False``: logits are gathered where they are made."""

Backend = Literal["local", "region", "replicated"]
"""How a kind of block runs. ``local``: on plain shards; its code sees their sizes. ``region``: on
DTensors between column and row; its code sees full sizes. ``replicated``: whole on every rank."""


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of which each rank keeps a part."""

    name: str
    names: tuple[str, ...]
    """All names of a tied parameter, ``name`` first."""
    shape: tuple[int, ...]
    """Full shape."""
    dim: int
    """The divided dimension."""
    sections: tuple[Section, ...]
    """Sections of that dimension, in order."""
    style: Style
    axis: int
    """Index in ``TensorPlan.axes``; parameters of one axis are divided together or not at all."""
    why: str = ""
    """Reason, for the table."""
    element_bytes: int = 4

    @property
    def length(self) -> int:
        """Full length of the divided dimension."""
        return sum(section.length for section in self.sections)

    def local_shape(self, size: int, rank: int = 0) -> tuple[int, ...]:
        """Shape of one rank's shard. Ranks differ only if a vocabulary does not divide evenly."""
        shape = list(self.shape)
        shape[self.dim] = sum(section.divided(size, rank).length for section in self.sections)
        return tuple(shape)

    @property
    def elements(self) -> int:
        """Elements of the full parameter."""
        return prod(self.shape)


@dataclass(frozen=True)
class PlannedDim:
    """A logical axis of the model that no operator needs whole, such as the heads of a block."""

    size: int
    """Number of indivisible units: heads, channels, tokens."""
    parameters: tuple[str, ...]
    blocks: tuple[str, ...]
    """The repeated blocks that contain it; empty for an axis outside of blocks.

    The last one is ``""`` if it also divides parameters outside of them.
    """


@dataclass(frozen=True)
class Unsharded:
    """A parameter that every rank keeps whole."""

    name: str
    why: str
    """The operator that needed it whole, or the size that does not divide; for the table."""
    shape: tuple[int, ...] = ()
    element_bytes: int = 4


@dataclass(frozen=True)
class SizeAttribute:
    """An integer of a module by which its code reshapes, such as ``num_heads``."""

    module: str
    name: str
    value: int
    """Value in the whole model."""


@dataclass(frozen=True)
class GatherPoint:
    """A module argument for which sequence parallelism gathers the sequence."""

    module: str
    argument: int | str
    """Index or keyword."""


@dataclass(frozen=True)
class ExitPoint:
    """The output of a module that contains the sequence."""

    module: str
    place: int | str | None
    """Index or key in a tuple or a mapping; None if the module returns one tensor."""


@dataclass(frozen=True)
class SequencePlan:
    """Division of the sequence, from the entry of a stack of blocks to its exit.

    The other fields of a plan with one contain its consequences: parameters between blocks are
    ``partial``, dropouts there are local, and a gather replaces the boundaries after it.
    """

    stacks: tuple[tuple[str, str], ...]
    """First and last block of each stack."""
    gathers: tuple[GatherPoint, ...]
    dim: int = 1
    """Dimension of the activations; ``[batch, sequence, channels]``."""
    entries: tuple[GatherPoint, ...] = ()
    """For each stack, the argument of its first block that is divided."""
    exits: tuple[ExitPoint, ...] = ()
    """For each stack, the output of its last block that is gathered."""
    fed: tuple[str, ...] = ()
    """Column modules fed by a gather: it sums their inputs' gradients, they do not."""
    plain_partial: tuple[str, ...] = ()
    """``TensorPlan.partial`` of the same plan with whole sequences; so the next two."""
    plain_boundaries: tuple[str, ...] = ()
    plain_local_dropouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorPlan:
    """All divisions over ``size`` ranks, and their consequences for the modules around them."""

    size: int
    axes: tuple[PlannedDim, ...] = ()
    sharded: dict[str, ShardedParameter] = field(default_factory=dict)
    """By first name, in the order of the model."""
    whole: tuple[Unsharded, ...] = ()
    partial: tuple[str, ...] = ()
    """Replicated parameters used with divided tensors: each rank has a part of their gradient."""
    boundaries: tuple[str, ...] = ()
    """Modules whose replicated output is used with divided tensors: its gradient is summed."""
    fed: tuple[str, ...] = ()
    """Column modules whose inputs come from boundaries, which sum the gradients of these."""
    local_dropouts: tuple[str, ...] = ()
    """Modules that draw random numbers for divided tensors: each rank draws its own."""
    attributes: tuple[SizeAttribute, ...] = ()
    """Candidates that the ``local`` backend may have to divide."""
    region_axes: tuple[int, ...] = ()
    """Axes whose sizes views name: those that ``region`` keeps as DTensors."""
    sequence: SequencePlan | None = None
    """None if it is not possible, or was not requested."""
    kinds: dict[str, str] = field(default_factory=dict)
    """First block of the kind, by name of every block; a missing block is alone."""
    divides_logits: bool = True
    """Whether heads may be divided by tokens."""
    backends: dict[str, Backend] = field(default_factory=dict)
    """By kind of block (the name of its first), and under the empty name for everything outside of
    blocks; set by verification."""
    notes: tuple[str, ...] = ()
    """Differences from other plans and fallbacks, for the table."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Operators without a rule, with their number of calls; tensors they used stay whole."""


def to_json(plan: TensorPlan) -> str:
    """Return a plan as JSON."""
    return msgspec.json.encode(plan).decode()


def from_json(text: str | bytes) -> TensorPlan:
    """Return the plan in a JSON text.

    Raises:
        ConfigError: If it is not a plan.
    """
    try:
        return msgspec.json.decode(text, type=TensorPlan)
    except msgspec.DecodeError as error:  # includes invalid values
        raise ConfigError(
            f"this is no tensor plan: {error}. Make one with to_json(plan)."
        ) from None
