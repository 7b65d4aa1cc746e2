"""Writes a selection of axes as a ``TensorPlan``, with the reasons why the rest is whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from boltmesh.strategies.tensor.analysis.analyse import Analysis, ParameterFacts
from boltmesh.strategies.tensor.analysis.symbolic_dims import SymbolicDim, leaves, representative
from boltmesh.strategies.tensor.analysis.trace import ShapeUse
from boltmesh.strategies.tensor.backends import OUTSIDE
from boltmesh.strategies.tensor.candidates import Member, Roles, ShardableDim, places, why_not
from boltmesh.strategies.tensor.plan import (
    PlannedDim,
    Section,
    ShardedParameter,
    SizeAttribute,
    TensorPlan,
    Unsharded,
)
from boltmesh.strategies.tensor.propagation import Propagation, axes_of
from boltmesh.strategies.tensor.vocab_experts import routed_experts


@dataclass
class Selection:
    """Axes that are divided, in the order of the model."""

    chosen: list[ShardableDim]
    flow: Propagation
    refused: dict[SymbolicDim, str] = field(default_factory=dict)
    """Reasons why other axes are not, in addition to those of the analysis."""


def plan_of(analysis: Analysis, size: int, choice: Selection) -> TensorPlan:
    """Return the plan that divides a selection."""
    sharded = _sharded(analysis, choice)
    followed = {each.atom for each in choice.chosen if not each.is_vocabulary}
    trace = analysis.trace
    named = [use for use in trace.shape_uses if not _is_of_its_own(analysis, use, sharded)]
    return TensorPlan(
        size,
        tuple(_axis(analysis, each) for each in choice.chosen),
        sharded,
        tuple(_whole(analysis, size, choice, set(sharded))),
        partial=tuple(name for name in choice.flow.partial if name not in sharded),
        boundaries=tuple(choice.flow.boundaries),
        fed=tuple(choice.flow.fed),
        local_dropouts=tuple(
            dict.fromkeys(each.module for each in trace.draws if axes_of(each.dims, followed))
        ),
        attributes=tuple(_attributes(analysis, followed)),
        region_axes=tuple(
            number
            for number, each in enumerate(choice.chosen)
            if any(axes_of(use.dims, {each.atom} & followed) for use in named)
        ),
        notes=tuple(_notes(analysis, sharded)),
        unknown=dict(trace.unknown),
    )


def _notes(analysis: Analysis, sharded: Mapping[str, ShardedParameter]) -> Iterator[str]:
    for each in routed_experts(analysis):
        count = sum(name in sharded for name in each.parameters)
        how = "split inside of each" if count == len(each.parameters) else "left whole"
        if 0 < count < len(each.parameters):
            how = "split inside of each in part"
        yield f"experts of {each.module}: {how}"
    for name, times in analysis.trace.unknown.items():
        yield f"{name} has no rule: what it touches is whole ({times} calls)"
    for name, times in analysis.trace.guessed.items():
        yield f"{name} looks at data, which the analysis has not: it went on with a guess ({times})"


def _sharded(analysis: Analysis, choice: Selection) -> dict[str, ShardedParameter]:
    found: dict[str, ShardedParameter] = {}
    for number, candidate in enumerate(choice.chosen):
        for each in candidate.members:
            facts = analysis.parameters[each.parameter]
            found[each.parameter] = ShardedParameter(
                each.parameter,
                facts.names,
                facts.shape,
                each.dim,
                _one_by_one(each.sections) if _is_of_attention(analysis, facts) else each.sections,
                each.style,
                number,
                _why(candidate, each),
                facts.element_bytes,
            )
    return {name: found[name] for name in analysis.parameters if name in found}


def _why(candidate: ShardableDim, member: Member) -> str:
    """Return why a parameter can be divided, for the table."""
    if candidate.is_vocabulary:
        return f"{candidate.atom.size} tokens, of which only sums are needed"
    parts = f"{candidate.atom.size} parts"
    if member.style == "row" or len(candidate.members) == 1:
        return f"sums over {parts} that nothing needs together"
    summed = next(
        (each.parameter for each in candidate.members if each.style in {"row", "expert"}), ""
    )
    if member.style == "expert":
        return f"{parts} inside of each expert, which nothing needs together"
    return f"{parts} that nothing needs together before {summed} sums over them"


def _is_of_attention(analysis: Analysis, facts: ParameterFacts) -> bool:
    return facts.name.rpartition(".")[0] in analysis.trace.attentions


def _one_by_one(sections: Sequence[Section]) -> tuple[Section, ...]:
    """The q, k and v of torch's attention as separate sections: it runs as three layers."""
    return tuple(Section(1, each.count, each.inner) for each in sections for _ in range(each.outer))


def _axis(analysis: Analysis, candidate: ShardableDim) -> PlannedDim:
    names = tuple(each.parameter for each in candidate.members)
    blocks = tuple(
        each for each in analysis.blocks if any(name.startswith(f"{each}.") for name in names)
    )
    if blocks and not all(name.startswith(tuple(f"{each}." for each in blocks)) for name in names):
        blocks = (*blocks, OUTSIDE)
    return PlannedDim(candidate.atom.size, names, blocks)


def _is_of_its_own(
    analysis: Analysis, use: ShapeUse, sharded: Mapping[str, ShardedParameter]
) -> bool:
    """Whether a module reshapes the result of its own parameter, as a linear layer does."""
    return any(
        name.rpartition(".")[0] == use.module for each in sharded.values() for name in each.names
    )


def _attributes(analysis: Analysis, followed: set[SymbolicDim]) -> list[SizeAttribute]:
    """Integers of modules that are a product of neighbouring axes, including a divided one.

    Only axes of parameters count: no module knows the number of rows of a batch. Products of
    torch's own modules combine them with heads.

    A number that distinguishes modules of one class, such as ``layer_idx``, equals a size in some
    of them by chance; see ``_tells_apart``.
    """
    known = set(places(analysis))
    sizes: dict[str, set[int]] = {}
    for use in analysis.trace.shape_uses:
        for dim in use.dims:
            atoms = leaves(dim)
            for start in range(len(atoms)):
                for end in range(start + 1, len(atoms) + 1):
                    part = atoms[start:end]
                    if (
                        axes_of([part], followed)
                        and {representative(each) for each in part} <= known
                    ):
                        sizes.setdefault(use.module, set()).add(prod(each.size for each in part))
    return [
        SizeAttribute(module, name, value)
        for module, values in analysis.integers.items()
        for name, value in values.items()
        if value in sizes.get(module, set()) and not _tells_apart(analysis, sizes, module, name)
    ]


def _tells_apart(analysis: Analysis, sizes: Mapping[str, set[int]], module: str, name: str) -> bool:
    """Whether an integer differs between modules of one class although their sizes do not.

    Args:
        analysis: Analysis of the model.
        sizes: Sizes by which modules view divided axes, by name of the module.
        module: One of the modules.
        name: Name of its integer.
    """
    kind = analysis.classes.get(module)
    twins = [each for each in sizes if analysis.classes.get(each) is kind]
    values = {each: analysis.integers[each].get(name) for each in twins}
    if len(set(values.values())) == 1:
        return False
    own = {frozenset(sizes[each]): value for each, value in values.items()}
    return any(
        value not in sizes[each] or value != own[frozenset(sizes[each])]
        for each, value in values.items()
    )


def _whole(analysis: Analysis, size: int, choice: Selection, sharded: set[str]) -> list[Unsharded]:
    roles = Roles(analysis)
    where = places(analysis)
    chosen = {each.atom for each in choice.chosen}
    reasons: dict[str, dict[str, None]] = {}
    for atom, found in where.items():
        why = choice.refused.get(atom) or why_not(atom, found, roles, size)
        if not why and atom not in chosen:
            why = "another axis of the same parameters has more"
        for each in found:
            if why:
                reasons.setdefault(each.parameter, {}).setdefault(why)
    return [
        Unsharded(
            name,
            "; ".join(reasons.get(name, {"it has one element": None})),
            facts.shape,
            facts.element_bytes,
        )
        for name, facts in analysis.parameters.items()
        if name not in sharded
    ]
