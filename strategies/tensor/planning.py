"""Makes a plan of what was found out about a model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from boltmesh.errors import ConfigError
from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.candidates import Candidate, candidates
from boltmesh.strategies.tensor.choosing import choose
from boltmesh.strategies.tensor.describing import Choice, plan_of
from boltmesh.strategies.tensor.experts import routed_experts
from boltmesh.strategies.tensor.flow import follow
from boltmesh.strategies.tensor.owners import refused_owners
from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.tensor.sequence_plan import divide_sequence
from boltmesh.strategies.tensor.sequence_walk import NoSequence
from boltmesh.strategies.tensor.vocabularies import vocabularies
from boltmesh.strategies.tensor.wishes import read_wishes

LossParallel = Literal["auto", True, False]


def make_plan(
    analysis: Analysis,
    size: int,
    *,
    loss_parallel: LossParallel = "auto",
    sequence_parallel: bool = False,
    wanted: Mapping[str, str] | None = None,
) -> TensorPlan:
    """Return what is divided over ``size`` ranks: the most that can be. The same on every run.

    Args:
        analysis: Of the model.
        size: Ranks of the tensor axis.
        loss_parallel: Whether logits are divided by tokens: where that is possible, always, never.
        sequence_parallel: Whether the sequence is divided between blocks.
        wanted: Style, or ``whole``, by pattern of names: see ``with_user_plan``.

    Raises:
        ConfigError: When what was asked for is not possible.
    """
    with_heads = loss_parallel is not False
    choice = _choose(analysis, size, wanted or {}, with_heads=with_heads)
    if loss_parallel is True and not any(each.is_vocabulary for each in choice.chosen):
        why = next(iter(choice.refused.values()), "no loss over tokens was found")
        raise ConfigError(
            f"loss_parallel=True, but no logits can be divided over {size} ranks: {why}. "
            f"Set loss_parallel='auto'."
        )
    plan = replace(plan_of(analysis, size, choice), divides_logits=with_heads)
    return _with_sequence(analysis, choice, plan) if sequence_parallel else plan


def _with_sequence(analysis: Analysis, choice: Choice, plan: TensorPlan) -> TensorPlan:
    """Divide the sequence between blocks as well, with all that follows from it."""
    experts = [each.module for each in routed_experts(analysis)]
    if experts:
        raise ConfigError(
            f"sequence_parallel=True, but {experts[0]} routes tokens to experts, and its "
            f"router has to see them all. Set sequence_parallel=False."
        )
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
        sequence=replace(
            division.plan,
            plain_partial=plan.partial,
            plain_boundaries=plan.boundaries,
            plain_local_dropouts=plan.local_dropouts,
        ),
    )


def _choose(
    analysis: Analysis, size: int, wanted: Mapping[str, str], *, with_heads: bool
) -> Choice:
    tokens, refused = vocabularies(analysis, size, with_heads=with_heads)
    taken = {each.atom for each in tokens} | set(refused)
    axes = [each for each in candidates(analysis, size) if each.atom not in taken]
    wishes = read_wishes(analysis, [*axes, *tokens], size, wanted)
    refused.update(wishes.whole)
    forced = {each.atom: each for each in wishes.forced}
    others = [each for each in (*axes, *tokens) if each.atom not in forced]
    fixed = {name for each in forced.values() for name in each.parameters}
    order = {name: number for number, name in enumerate(analysis.parameters)}
    items = sorted(
        [*forced.values(), *(each for each in others if not each.parameters & fixed)],
        key=lambda each: (order[each.members[0].parameter], each.members[0].dim),
    )
    while True:
        usable = [each for each in items if each.atom not in refused]
        chosen = choose(usable, {each: each.weight for each in usable}, _conflicts(usable))
        sharded = {name: each.atom for each in chosen for name in each.parameters}
        styles = {m.parameter: m.style for each in chosen for m in each.members}
        followed = [each.atom for each in chosen if not each.is_vocabulary]
        flow = follow(analysis, sharded, followed, styles)
        flow.refused.update(refused_owners(analysis, sharded, styles, frozenset(followed)))
        for atom, why in flow.refused.items():
            if atom in forced:
                raise ConfigError(
                    f"plan divides {min(forced[atom].parameters)}, but {why}. Take it out of plan."
                )
        if not flow.refused:
            return Choice(chosen, flow, refused)
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
