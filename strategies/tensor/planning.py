"""Makes a plan from the analysis of a model.

``make_plan`` selects the axes to divide: the most elements, without dividing a parameter twice
(``choose``). ``with_user_plan`` applies a user's mapping to a plan.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from boltmesh.errors import ConfigError
from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.candidates import ShardableDim, candidates
from boltmesh.strategies.tensor.emit_plan import Selection, plan_of
from boltmesh.strategies.tensor.overrides import read_wishes
from boltmesh.strategies.tensor.plan import LossParallel, TensorPlan
from boltmesh.strategies.tensor.propagation import follow, refused_owners
from boltmesh.strategies.tensor.sequence import NoSequence, divide_sequence
from boltmesh.strategies.tensor.vocab_experts import routed_experts, vocabularies

EXACT_UP_TO = 16
"""Connected components of up to this many items are solved exactly."""

_Item = TypeVar("_Item", bound=Hashable)


def choose(
    items: Sequence[_Item], weights: Mapping[_Item, int], conflicts: Mapping[_Item, set[_Item]]
) -> list[_Item]:
    """Return items of the greatest weight without conflicts between them.

    A maximum-weight independent set, exact in each connected component of up to ``EXACT_UP_TO``
    items; in larger ones the heaviest item is taken first. Deterministic for an order of items.

    Args:
        items: In the order that decides between equal weights.
        weights: Greater than 0.
        conflicts: In both directions.
    """
    place = {each: number for number, each in enumerate(items)}
    chosen: list[_Item] = []
    for component in _components(items, conflicts):
        component.sort(key=place.__getitem__)
        if len(component) <= EXACT_UP_TO:
            chosen += _heaviest(component, weights, conflicts)
        else:
            chosen += _greedy(component, weights, conflicts)
    return sorted(chosen, key=place.__getitem__)


def _components(items: Sequence[_Item], conflicts: Mapping[_Item, set[_Item]]) -> list[list[_Item]]:
    """Items connected by conflicts, directly or through others."""
    found: list[list[_Item]] = []
    seen: set[_Item] = set()
    for each in items:
        component, waiting = [], [each]
        while waiting:
            item = waiting.pop()
            if item not in seen:
                seen.add(item)
                component.append(item)
                waiting += conflicts.get(item, set())
        if component:
            found.append(component)
    return found


def _heaviest(
    items: Sequence[_Item], weights: Mapping[_Item, int], conflicts: Mapping[_Item, set[_Item]]
) -> list[_Item]:
    """Try each item within a selection and without it."""
    if not items:
        return []
    first, *rest = items
    without = conflicts.get(first, set())
    taken = [
        first, *_heaviest([each for each in rest if each not in without], weights, conflicts)
    ]  # fmt: skip
    if not without & set(rest):
        return taken
    left = _heaviest(rest, weights, conflicts)
    return taken if _weight(taken, weights) >= _weight(left, weights) else left


def _greedy(
    items: Sequence[_Item], weights: Mapping[_Item, int], conflicts: Mapping[_Item, set[_Item]]
) -> list[_Item]:
    chosen: set[_Item] = set()
    for each in sorted(items, key=lambda item: -weights[item]):
        if not conflicts.get(each, set()) & chosen:
            chosen.add(each)
    return [each for each in items if each in chosen]


def _weight(items: Sequence[_Item], weights: Mapping[_Item, int]) -> int:
    return sum(weights[each] for each in items)


def make_plan(
    analysis: Analysis,
    size: int,
    *,
    loss_parallel: LossParallel = "auto",
    sequence_parallel: bool = False,
    wanted: Mapping[str, str] | None = None,
) -> TensorPlan:
    """Return a plan that divides as much as possible over ``size`` ranks. Deterministic.

    Args:
        analysis: Analysis of the model.
        size: Ranks of the tensor axis.
        loss_parallel: Whether logits are divided by tokens: if possible, always, never.
        sequence_parallel: Whether the sequence is divided between blocks.
        wanted: Style, or ``whole``, by name pattern: see ``with_user_plan``.

    Raises:
        ConfigError: If an option is not possible.
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


def _with_sequence(analysis: Analysis, choice: Selection, plan: TensorPlan) -> TensorPlan:
    """Divide the sequence between blocks too, with all consequences."""
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
) -> Selection:
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
            return Selection(chosen, flow, refused)
        refused.update(flow.refused)


def _conflicts(items: Sequence[ShardableDim]) -> dict[ShardableDim, set[ShardableDim]]:
    """Axes that would divide the same parameter twice."""
    by_parameter: dict[str, list[ShardableDim]] = {}
    for each in items:
        for name in each.parameters:
            by_parameter.setdefault(name, []).append(each)
    conflicts: dict[ShardableDim, set[ShardableDim]] = {}
    for several in by_parameter.values():
        for each in several:
            conflicts.setdefault(each, set()).update(set(several) - {each})
    return conflicts


def with_user_plan(plan: TensorPlan, analysis: Analysis, mapping: Mapping[str, str]) -> TensorPlan:
    """Return a plan with a user's mapping applied; the rest stays as it can.

    Parameters of one axis are divided together: if one has to be whole, all are, and the notes
    list them.

    Args:
        plan: The plan that was found.
        analysis: The analysis that it was made from.
        mapping: Style, or ``whole``, by pattern of the names of parameters or modules; ``*``
            matches any part of a name.

    Raises:
        ConfigError: If a pattern matches nothing, or something that cannot be divided that way.
    """
    changed = make_plan(
        analysis,
        plan.size,
        loss_parallel="auto" if plan.divides_logits else False,
        sequence_parallel=plan.sequence is not None,
        wanted=mapping,
    )
    lost = [name for name in plan.sharded if name not in changed.sharded]
    notes = [*plan.notes]
    if lost:
        notes.append(f"whole by the plan that was given: {', '.join(lost)}")
    return replace(changed, notes=tuple(notes))
