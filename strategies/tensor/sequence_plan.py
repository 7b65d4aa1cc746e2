"""Where the sequence may be divided between the matrix products of stacked blocks.

Between a row-parallel product and the next column-parallel one, norms, dropouts and residual sums
look at one token at a time, so each rank may have some of the tokens. In front of the columns the
sequence is gathered, once for all of a module where everything that the module makes of it is
divided; behind the rows it is scattered where it was summed.

The gather sums its gradient over the ranks. So within it a replicated parameter has a part of its
gradient, and nothing is summed a second time: not in front of columns, not at boundaries.

Source: Reducing Activation Recomputation in Large Transformer Models, Korthikanti et al. 2022,
section 4.2, https://arxiv.org/abs/2205.05198
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import pairwise

from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.atoms import Atom, leaves
from boltmesh.strategies.tensor.analysis.records import Operand
from boltmesh.strategies.tensor.plan import ExitPoint, GatherPoint, SequencePlan, Style
from boltmesh.strategies.tensor.sequence_walk import NoSequence, Walk


@dataclass(frozen=True)
class Stack:
    """Blocks of one list, each of which takes what the one before gives."""

    blocks: tuple[str, ...]
    argument: int | str
    """Of the first block."""
    entry: Operand
    exit: Operand
    place: int | str | None
    """Of the exit, in what the last block gives."""
    dim: int
    """Of the sequence."""


@dataclass
class Division:
    """What dividing the sequences of all stacks asks for."""

    plan: SequencePlan
    partial: set[str] = field(default_factory=set)
    drawing: list[str] = field(default_factory=list)
    """Modules that draw for some of the tokens."""
    gathered: set[int] = field(default_factory=set)
    """Keys of activations behind a gather and before the rows."""


def divide_sequence(
    analysis: Analysis, styles: Mapping[str, Style], followed: Set[Atom]
) -> Division:
    """Return where sequences are divided, and what follows from that.

    Args:
        analysis: Of the model.
        styles: Of each parameter that is divided.
        followed: Axes that activations have within blocks.

    Raises:
        NoSequence: When a stack's cannot be divided.
    """
    stacks = list(_stacks(analysis))
    if not stacks:
        raise NoSequence("no stack of blocks passes one activation on")
    if len({each.dim for each in stacks}) > 1:
        raise NoSequence("the sequence is another dimension in other stacks")
    walks = [Walk(analysis, styles, followed, each) for each in stacks]
    for each in walks:
        each.run()
    plan = SequencePlan(
        tuple((each.blocks[0], each.blocks[-1]) for each in stacks),
        tuple(dict.fromkeys(point for each in walks for point in each.gathers)),
        stacks[0].dim,
        entries=tuple(GatherPoint(each.blocks[0], each.argument) for each in stacks),
        exits=tuple(ExitPoint(each.blocks[-1], each.place) for each in stacks),
        fed=tuple(dict.fromkeys(name for each in walks for name in each.fed)),
    )
    return Division(
        plan,
        {name for each in walks for name in each.partial},
        list(dict.fromkeys(name for each in walks for name in each.drawing)),
        {key for each in walks for key in each.gathered},
    )


def _stacks(analysis: Analysis) -> Iterator[Stack]:
    by_list: dict[str, list[str]] = {}
    for name in analysis.blocks:
        if name in analysis.trace.module_outputs:
            by_list.setdefault(name.rpartition(".")[0], []).append(name)
    for blocks in by_list.values():
        if len(blocks) > 1 and (stack := _chained(analysis, tuple(blocks))) is not None:
            yield stack


def _chained(analysis: Analysis, blocks: tuple[str, ...]) -> Stack | None:
    """Find the activation that goes from block to block; None where there is none."""
    inputs, outputs = analysis.trace.module_inputs, analysis.trace.module_outputs
    for argument, entry in inputs[blocks[0]].items():
        for place, given in outputs[blocks[0]].items():
            is_passed_on = all(
                outputs[one].get(place) is not None
                and outputs[one][place].key in {each.key for each in inputs[other].values()}
                for one, other in pairwise(blocks)
            )
            if is_passed_on and len(given.dims) == len(entry.dims) and len(entry.dims) in {2, 3}:
                last = outputs[blocks[-1]].get(place)
                if last is not None:
                    return Stack(blocks, argument, entry, last, place, _sequence_dim(entry))
    return None


def _sequence_dim(entry: Operand) -> int:
    """The second of three dimensions, or the first one where attention looks along that."""
    first, second = (any(each.is_whole for each in leaves(dim)) for dim in entry.dims[:2])
    return 0 if len(entry.dims) == 2 or (first and not second) else 1
