"""The tensor plan: which parameters are divided over the axis, and how. Plain data, without torch.

A ``TensorPlan`` can be printed, sent as JSON and edited; a plan can be made and a checkpoint read
without torch.

A divided dimension is a sequence of ``Section``: the q, k and v of a fused projection, the gate
and up of a gated MLP. Each section is a block of ``outer x count x inner`` elements, row by row,
of which ``count`` is divided: heads, with the channels of a head inside and, in some models,
(q, k, v) outside. A rank keeps its part of every section, so its shard is again a sequence of
sections, with ``count / size`` in place of ``count``. Only the tokens of a vocabulary may be
divided unevenly: the first ranks have one more.

``without_replicated`` and ``without_sequence`` return a plan in which some parts stay whole.
``plan_table`` is what telemetry and ``boltmesh plan`` show: one row for each kind of parameter.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, NamedTuple

import msgspec

from boltmesh.errors import ConfigError
from boltmesh.telemetry.tensor_plan import PlannedBlocks, PlannedParameters, TensorPlanTable


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
        """Return the part of one of ``size`` ranks; all are equal if the count divides evenly."""
        return Section(self.outer, balanced_share(self.count, size, rank)[1], self.inner)


def balanced_share(count: int, size: int, rank: int) -> tuple[int, int]:
    """Return the start and size of a rank's share of ``count``.

    If ``count`` does not divide evenly, the first ranks have one more than the last.
    """
    each, left = divmod(count, size)
    return rank * each + min(rank, left), each + (rank < left)


class ElementRange(NamedTuple):
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
    """Yield start and length of each contiguous range that a rank keeps."""
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
"""``True``: what needs whole logits is refused. ``"auto"``: it gathers them, and a note says so.
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
    """Why it is divided so, for the table."""
    element_bytes: int = 4

    @property
    def length(self) -> int:
        """Full length of the divided dimension."""
        return sum(section.length for section in self.sections)

    def local_shape(self, size: int, rank: int = 0) -> tuple[int, ...]:
        """Return the shape of a rank's shard; all are equal if a vocabulary divides evenly."""
        shape = list(self.shape)
        shape[self.dim] = sum(section.divided(size, rank).length for section in self.sections)
        return tuple(shape)

    @property
    def elements(self) -> int:
        """Elements of the full parameter."""
        return prod(self.shape)


OUTSIDE = ""
"""Name for parameters outside of repeated blocks."""


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

    @property
    def blocks_or_outside(self) -> tuple[str, ...]:
        """Its blocks, or ``OUTSIDE`` alone."""
        return self.blocks or (OUTSIDE,)


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
    """An integer of a module that its code uses to reshape, such as ``num_heads``."""

    module: str
    name: str
    value: int
    """Value in the whole model."""


@dataclass(frozen=True)
class PassedTensor:
    """A divided tensor that a block takes or returns, such as T5's bias of positions."""

    place: int | str | None
    """As in ``GatherPoint``, or as in ``ExitPoint``."""
    dim: int
    axis: int
    """Index in ``TensorPlan.axes``."""
    is_output: bool = False


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
class WholePoint:
    """A module that runs on the whole sequence within a stack, such as a mixture of experts."""

    module: str
    argument: int | str
    place: int | str | None
    """As at ``ExitPoint``."""
    sums: bool = False
    """Whether each rank has a part of its input's gradient."""


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
    whole: tuple[WholePoint, ...] = ()
    divided: tuple[str, ...] = ()
    """Modules of the blocks that return some of the tokens."""
    plain_partial: tuple[str, ...] = ()
    """``TensorPlan.partial`` of the same plan with whole sequences; so are the next two fields."""
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
    divided_inputs: tuple[str, ...] = ()
    """Modules that take a divided activation: a forward pre-hook sees this rank's part."""
    divided_outputs: tuple[str, ...] = ()
    """Modules that return one: a forward hook or a backward hook sees this rank's part."""
    passed: dict[str, tuple[PassedTensor, ...]] = field(default_factory=dict)
    """Divided tensors between blocks, by block; without blocks where a place is not known."""
    attributes: tuple[SizeAttribute, ...] = ()
    """Candidates that the ``local`` backend may have to divide."""
    region_axes: tuple[int, ...] = ()
    """Axes whose sizes appear in views: ``region`` keeps these as DTensors."""
    sequence: SequencePlan | None = None
    """None if it is not possible, or was not requested."""
    kinds: dict[str, str] = field(default_factory=dict)
    """First block of the kind, by name of every block; a missing block is the only one."""
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


_ORDER: tuple[Backend, ...] = ("local", "region", "replicated")
"""In the order in which they are tried; the last one always works."""


def backend_of(plan: TensorPlan, block: str) -> Backend:
    """Return a block's backend: that of the first of its kind; ``local`` by default."""
    return plan.backends.get(plan.kinds.get(block, block), "local")


def backends_of_axes(plan: TensorPlan) -> list[Backend]:
    """Return the backend of each axis.

    Blocks that share an axis, such as those that share T5's position bias, use the same backend:
    the latest in the order among theirs.
    """
    known: dict[str, Backend] = {
        block: backend_of(plan, block) for axis in plan.axes for block in axis.blocks_or_outside
    }
    before: dict[str, Backend] = {}
    while known != before:
        before = dict(known)
        for axis in plan.axes:
            hardest = _hardest(known[block] for block in axis.blocks_or_outside)
            known.update(dict.fromkeys(axis.blocks_or_outside, hardest))
    return [_hardest(known[block] for block in axis.blocks_or_outside) for axis in plan.axes]


def block_of(plan: TensorPlan, name: str) -> str:
    """Return the block that contains a module or parameter, or ``OUTSIDE``."""
    known = {block for axis in plan.axes for block in axis.blocks} | plan.kinds.keys()
    return block_around(name, known)


def block_around(name: str, blocks: Iterable[str]) -> str:
    """Return which of some blocks contains a module or parameter, or ``OUTSIDE``."""
    return next((each for each in blocks if f"{name}.".startswith(f"{each}.")), OUTSIDE)


def region_blocks(plan: TensorPlan) -> set[str]:
    """Return the blocks that run on DTensors, perhaps with ``OUTSIDE``."""
    return {
        block
        for axis, backend in zip(plan.axes, backends_of_axes(plan), strict=True)
        if backend == "region"
        for block in axis.blocks_or_outside
    }


def without_replicated(plan: TensorPlan) -> TensorPlan:
    """Return the plan without divisions in blocks that stay whole. Axes keep their indices."""
    backends = backends_of_axes(plan)
    whole = {index for index, backend in enumerate(backends) if backend == "replicated"}
    if not whole:
        return plan
    blocks = {block for index in whole for block in plan.axes[index].blocks_or_outside}

    def stays(name: str) -> bool:
        return block_of(plan, name) not in blocks

    dropped = [each for each in plan.sharded.values() if each.axis in whole]
    return replace(
        plan,
        sharded={name: each for name, each in plan.sharded.items() if each.axis not in whole},
        whole=plan.whole
        + tuple(Unsharded(each.name, "its block did not verify") for each in dropped),
        partial=tuple(filter(stays, plan.partial)),
        boundaries=tuple(filter(stays, plan.boundaries)),
        fed=tuple(filter(stays, plan.fed)),
        local_dropouts=tuple(filter(stays, plan.local_dropouts)),
        divided_inputs=tuple(filter(stays, plan.divided_inputs)),
        divided_outputs=tuple(filter(stays, plan.divided_outputs)),
        passed={
            name: tuple(each for each in several if each.axis not in whole)
            for name, several in plan.passed.items()
        },
        attributes=tuple(each for each in plan.attributes if stays(each.module)),
        region_axes=tuple(each for each in plan.region_axes if each not in whole),
    )


def without_sequence(plan: TensorPlan) -> TensorPlan:
    """Return the plan with whole sequences, without the consequences of dividing them."""
    if plan.sequence is None:
        return plan
    return replace(
        plan,
        sequence=None,
        partial=plan.sequence.plain_partial,
        boundaries=plan.sequence.plain_boundaries,
        local_dropouts=plan.sequence.plain_local_dropouts,
    )


def _hardest(backends: Iterable[Backend]) -> Backend:
    return max(backends, key=_ORDER.index)


def rows(plan: TensorPlan) -> tuple[PlannedParameters, ...]:
    """Return the rows: divided parameters in the order of the model, then whole ones."""
    grouped: dict[tuple[object, ...], PlannedParameters] = {}
    for each in _single_rows(plan):
        key = (each.pattern, each.shape, each.style, each.why, each.collectives)
        known = grouped.setdefault(key, each)
        if known is not each:
            grouped[key] = msgspec.structs.replace(
                known,
                count=known.count + each.count,
                rank_bytes=known.rank_bytes + each.rank_bytes,
                whole_bytes=known.whole_bytes + each.whole_bytes,
            )
    return tuple(grouped.values())


def without_numbers(name: str) -> str:
    """Replace numbers in dotted names by ``*``."""
    return re.sub(r"(?<=\.)\d+(?=[.\s;,]|$)|^\d+(?=\.)", "*", name)


def _single_rows(plan: TensorPlan) -> Iterator[PlannedParameters]:
    for sharded in plan.sharded.values():
        yield PlannedParameters(
            without_numbers(sharded.name),
            1,
            sharded.shape,
            _style(sharded),
            without_numbers(sharded.why),
            prod(sharded.local_shape(plan.size)) * sharded.element_bytes,
            sharded.elements * sharded.element_bytes,
            _collectives(plan, sharded),
        )
    for each in plan.whole:
        yield PlannedParameters(
            without_numbers(each.name),
            1,
            each.shape,
            "whole",
            without_numbers(each.why),
            prod(each.shape) * each.element_bytes,
            prod(each.shape) * each.element_bytes,
            _collectives_of_whole(plan, each),
        )


def _style(sharded: ShardedParameter) -> str:
    sections = " + ".join(
        f"{each.outer}x{each.count}x{each.inner}"
        if each.outer > 1
        else f"{each.count}x{each.inner}"
        for each in sharded.sections
    )
    return f"{sharded.style} of dim {sharded.dim}: {sections}"


def _collectives(plan: TensorPlan, sharded: ShardedParameter) -> str:
    if len(sharded.shape) == 1:  # it goes with a matrix
        return ""
    module = sharded.name.rpartition(".")[0]
    if plan.sequence is not None and plan.axes[sharded.axis].blocks:
        if sharded.style == "row":
            return "scattered sum forward, gather backward"
        if module in plan.sequence.fed:
            return "gather forward, scattered sum backward, once for all of an input"
    if module in plan.fed:
        return "its input's gradient is summed further up"
    return {
        "column": "sum backward",
        "row": "sum forward",
        "expert": "sum forward and backward, once for both matrices",
        "vocabulary": "a lookup: sum forward; a loss: maximum and sums forward, sum backward",
    }.get(sharded.style, "")


def _collectives_of_whole(plan: TensorPlan, whole: Unsharded) -> str:
    module = whole.name.rpartition(".")[0]
    if whole.name in plan.partial:
        return "sum of its gradient"
    return "sum backward of what it gives" if module in plan.boundaries else ""


def plan_table(plan: TensorPlan) -> TensorPlanTable:
    """Return the table of a plan, the backends of its blocks, and its notes."""
    counts = Counter(plan.kinds.values())
    return TensorPlanTable(
        size=plan.size,
        rows=rows(plan),
        blocks=tuple(
            # A kind without listed blocks is one block alone, or everything outside of blocks.
            PlannedBlocks(first, counts.get(first, 1), backend)
            for first, backend in plan.backends.items()
        ),
        notes=tuple(dict.fromkeys(map(without_numbers, plan.notes))),
    )
