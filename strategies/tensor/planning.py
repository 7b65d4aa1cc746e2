"""Makes a plan of what was found out about a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from boltmesh.errors import ConfigError
from boltmesh.strategies.tensor.analysis.analyse import Analysis, ParameterFacts
from boltmesh.strategies.tensor.analysis.atoms import Atom, leaves
from boltmesh.strategies.tensor.analysis.records import ShapeUse
from boltmesh.strategies.tensor.candidates import Candidate, Roles, candidates, places, why_not
from boltmesh.strategies.tensor.choosing import choose
from boltmesh.strategies.tensor.flow import Flow, axes_of, follow
from boltmesh.strategies.tensor.plan import (
    PlannedAxis,
    ShardedParameter,
    SizeAttribute,
    TensorPlan,
    Whole,
)
from boltmesh.strategies.tensor.sections import Section
from boltmesh.strategies.tensor.sequence_plan import divide_sequence
from boltmesh.strategies.tensor.sequence_walk import NoSequence
from boltmesh.strategies.tensor.vocabularies import vocabularies

LossParallel = Literal["auto", True, False]


@dataclass
class _Choice:
    """Axes that are divided, in the order of the model."""

    chosen: list[Candidate]
    flow: Flow
    refused: dict[Atom, str] = field(default_factory=dict)
    """Why other axes are not, beyond what the analysis says."""


def make_plan(
    analysis: Analysis,
    size: int,
    *,
    loss_parallel: LossParallel = "auto",
    sequence_parallel: bool = False,
) -> TensorPlan:
    """Return what is divided over ``size`` ranks: the most that can be. The same on every run.

    Args:
        analysis: Of the model.
        size: Ranks of the tensor axis.
        loss_parallel: Whether logits are divided by tokens: where that is possible, always, never.
        sequence_parallel: Whether the sequence is divided between blocks.

    Raises:
        ConfigError: When what was asked for is not possible.
    """
    choice = _choose(analysis, size, with_heads=loss_parallel is not False)
    if loss_parallel is True and not any(each.is_vocabulary for each in choice.chosen):
        why = next(iter(choice.refused.values()), "no loss over tokens was found")
        raise ConfigError(
            f"loss_parallel=True, but no logits can be divided over {size} ranks: {why}. "
            f"Set loss_parallel='auto'."
        )
    plan = _plan(analysis, size, choice)
    return _with_sequence(analysis, choice, plan) if sequence_parallel else plan


def _with_sequence(analysis: Analysis, choice: _Choice, plan: TensorPlan) -> TensorPlan:
    """Divide the sequence between blocks as well, with all that follows from it."""
    styles = {name: each.style for name, each in plan.sharded.items()}
    followed = {each.atom for each in choice.chosen if not each.is_vocabulary}
    try:
        division = divide_sequence(analysis, styles, followed)
    except NoSequence as why:
        raise ConfigError(
            f"sequence_parallel=True, but {why}. Set sequence_parallel=False."
        ) from None
    outputs = analysis.trace.module_outputs
    gathered = {
        name
        for name in plan.boundaries
        if any(each.key in division.gathered for each in outputs.get(name, {}).values())
    }
    partial = division.partial | set(plan.partial)
    return replace(
        plan,
        partial=tuple(name for name in analysis.parameters if name in partial),
        boundaries=tuple(name for name in plan.boundaries if name not in gathered),
        local_dropouts=tuple(dict.fromkeys([*plan.local_dropouts, *division.drawing])),
        sequence=division.plan,
    )


def _choose(analysis: Analysis, size: int, *, with_heads: bool) -> _Choice:
    tokens, refused = vocabularies(analysis, size, with_heads=with_heads)
    taken = {each.atom for each in tokens} | set(refused)
    axes = [each for each in candidates(analysis, size) if each.atom not in taken]
    order = {name: number for number, name in enumerate(analysis.parameters)}
    items = sorted(
        [*axes, *tokens], key=lambda each: (order[each.members[0].parameter], each.members[0].dim)
    )
    while True:
        usable = [each for each in items if each.atom not in refused]
        chosen = choose(usable, {each: each.weight for each in usable}, _conflicts(usable))
        sharded = {name: each.atom for each in chosen for name in each.parameters}
        flow = follow(analysis, sharded, [each.atom for each in chosen if not each.is_vocabulary])
        if not flow.refused:
            return _Choice(chosen, flow, refused)
        refused.update(flow.refused)


def _conflicts(items: Sequence[Candidate]) -> dict[Candidate, set[Candidate]]:
    """Which would divide the same parameter twice."""
    by_parameter: dict[str, list[Candidate]] = {}
    for each in items:
        for name in each.parameters:
            by_parameter.setdefault(name, []).append(each)
    conflicts: dict[Candidate, set[Candidate]] = {}
    for several in by_parameter.values():
        for each in several:
            conflicts.setdefault(each, set()).update(set(several) - {each})
    return conflicts


def _plan(analysis: Analysis, size: int, choice: _Choice) -> TensorPlan:
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
        local_dropouts=tuple(
            dict.fromkeys(each.module for each in trace.draws if axes_of(each.dims, followed))
        ),
        attributes=tuple(_attributes(analysis, followed)),
        region_axes=tuple(
            number
            for number, each in enumerate(choice.chosen)
            if any(axes_of(use.dims, {each.atom} & followed) for use in named)
        ),
        unknown=dict(trace.unknown),
    )


def _sharded(analysis: Analysis, choice: _Choice) -> dict[str, ShardedParameter]:
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
            )
    return {name: found[name] for name in analysis.parameters if name in found}


def _is_of_attention(analysis: Analysis, facts: ParameterFacts) -> bool:
    return facts.name.rpartition(".")[0] in analysis.trace.attentions


def _one_by_one(sections: Sequence[Section]) -> tuple[Section, ...]:
    """The q, k and v of torch's attention as sections of their own: it is run as three layers."""
    return tuple(Section(1, each.count, each.inner) for each in sections for _ in range(each.outer))


def _axis(analysis: Analysis, candidate: Candidate) -> PlannedAxis:
    names = tuple(each.parameter for each in candidate.members)
    blocks = tuple(
        each for each in analysis.blocks if any(name.startswith(f"{each}.") for name in names)
    )
    return PlannedAxis(candidate.atom.size, names, blocks)


def _is_of_its_own(
    analysis: Analysis, use: ShapeUse, sharded: Mapping[str, ShardedParameter]
) -> bool:
    """Whether a module views what it makes of its own parameter, as a linear layer does."""
    return any(
        name.rpartition(".")[0] == use.module for each in sharded.values() for name in each.names
    )


def _attributes(analysis: Analysis, followed: set[Atom]) -> list[SizeAttribute]:
    """Integers of modules that are a product of neighbouring axes, a divided one among them."""
    sizes: dict[str, set[int]] = {}
    for use in analysis.trace.shape_uses:
        for dim in use.dims:
            atoms = leaves(dim)
            for start in range(len(atoms)):
                for end in range(start + 1, len(atoms) + 1):
                    part = atoms[start:end]
                    if axes_of([part], followed):
                        sizes.setdefault(use.module, set()).add(prod(each.size for each in part))
    return [
        SizeAttribute(module, name, value)
        for module, values in analysis.integers.items()
        for name, value in values.items()
        if value in sizes.get(module, set())
    ]


def _whole(analysis: Analysis, size: int, choice: _Choice, sharded: set[str]) -> list[Whole]:
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
        Whole(name, "; ".join(reasons.get(name, {"it has one element": None})))
        for name in analysis.parameters
        if name not in sharded
    ]
