"""Makes a plan from the analysis of a model.

``make_plan`` selects the axes to divide: the most elements, without dividing a parameter twice
(``choose``). ``plan_of`` writes a selection as a ``TensorPlan``, with the reasons why the rest is
whole. ``with_user_plan`` applies a user's mapping to a plan.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod
from typing import Any, TypeVar

from boltmesh.errors import ConfigError
from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.symbolic_dims import SymbolicDim, leaves
from boltmesh.strategies.tensor.analysis.trace import Operand
from boltmesh.strategies.tensor.candidates import (
    Member,
    Roles,
    ShardableDim,
    candidates,
    places,
    routed_experts,
    vocabularies,
    why_not,
)
from boltmesh.strategies.tensor.options import read_overrides
from boltmesh.strategies.tensor.plan import (
    OUTSIDE,
    LossParallel,
    PassedTensor,
    PlannedDim,
    Section,
    ShardedParameter,
    SizeAttribute,
    TensorPlan,
    Unsharded,
)
from boltmesh.strategies.tensor.propagation import Follower, Propagation, axes_of, refused_owners
from boltmesh.strategies.tensor.sequence import NoSequence, divide_sequence


@dataclass
class Selection:
    """Axes that are divided, in the order of the model."""

    chosen: list[ShardableDim]
    flow: Propagation
    refused: dict[SymbolicDim, str] = field(default_factory=dict)
    """Reasons why other axes are not, in addition to those of the analysis."""

    @property
    def followed(self) -> set[SymbolicDim]:
        """Axes of activations within blocks, without those of tokens."""
        return {axis.atom for axis in self.chosen if not axis.is_vocabulary}


def plan_of(analysis: Analysis, size: int, choice: Selection) -> TensorPlan:
    """Return the plan that divides a selection."""
    sharded = _sharded(analysis, choice)
    followed, trace = choice.followed, analysis.trace
    # Without modules that reshape the result of their own parameter, as a linear layer does.
    owners = {name.rpartition(".")[0] for each in sharded.values() for name in each.names}
    named = [use for use in trace.shape_uses if use.module not in owners]
    return TensorPlan(
        size,
        tuple(_axis(analysis, axis) for axis in choice.chosen),
        sharded,
        tuple(_whole(analysis, size, choice, set(sharded))),
        partial=tuple(name for name in choice.flow.partial if name not in sharded),
        boundaries=tuple(choice.flow.boundaries),
        fed=tuple(choice.flow.fed),
        local_dropouts=tuple(_drawing_parts(analysis, followed)),
        divided_inputs=_divided(trace.module_inputs, followed),
        divided_outputs=_divided(trace.module_outputs, followed),
        passed=_passed(analysis, choice),
        attributes=tuple(_attributes(analysis, followed)),
        region_axes=tuple(
            number
            for number, axis in enumerate(choice.chosen)
            if any(axes_of(use.dims, {axis.atom} & followed) for use in named)
        ),
        notes=tuple(_notes(analysis, sharded)),
        unknown=dict(trace.unknown),
    )


def _drawing_parts(analysis: Analysis, followed: set[SymbolicDim]) -> list[str]:
    """Return the modules that draw random numbers only for divided tensors.

    A module that also draws for whole tensors draws equal numbers on all ranks: a part of a forward
    cannot have its own generator, and whole tensors have to stay equal on all ranks.
    """
    draws = analysis.trace.draws
    whole = {draw.module for draw in draws if not axes_of(draw.dims, followed)}
    return list(dict.fromkeys(draw.module for draw in draws if draw.module not in whole))


def _divided(
    passed: Mapping[str, Mapping[Any, Operand]], followed: set[SymbolicDim]
) -> tuple[str, ...]:
    """Return the modules that take or return an activation with a divided dim."""
    return tuple(
        name
        for name, operands in passed.items()
        if any(axes_of(operand.dims, followed) for operand in operands.values())
    )


def _passed(analysis: Analysis, choice: Selection) -> dict[str, tuple[PassedTensor, ...]]:
    """Return the divided tensors that blocks take and return, if all have known places.

    A tensor that a block gets another way, as within a list, has none.
    """
    trace, followed = analysis.trace, choice.followed
    made = {out.key: step.modules for step in trace.steps for out in step.outputs}
    crossing: dict[str, set[int]] = {block: set() for block in analysis.blocks}
    for step in trace.steps:
        for operand in step.inputs:
            if axes_of(operand.dims, followed):
                before = made.get(operand.key, step.modules)
                for block in ({*before} ^ {*step.modules}) & crossing.keys():
                    crossing[block].add(operand.key)
    numbers = {
        axis.atom: number for number, axis in enumerate(choice.chosen) if axis.atom in followed
    }
    found: dict[str, tuple[PassedTensor, ...]] = {}
    for block, keys in crossing.items():
        passed: list[PassedTensor | None] = []
        unplaced = set(keys)
        for taken, is_output in ((trace.module_inputs, False), (trace.module_outputs, True)):
            for place, operand in taken.get(block, {}).items():
                if axes_of(operand.dims, followed):
                    unplaced.discard(operand.key)
                    passed.append(_passed_at(place, operand, numbers, is_output=is_output))
        known = tuple(each for each in passed if each is not None)
        if known and not unplaced and len(known) == len(passed):
            found[block] = known
    return found


def _passed_at(
    place: int | str | None, operand: Operand, axes: Mapping[SymbolicDim, int], *, is_output: bool
) -> PassedTensor | None:
    """Describe a tensor of which each rank has a contiguous part along one dim; None for others."""
    followed = set(axes)
    divided = [dim for dim, atoms in enumerate(operand.dims) if axes_of([atoms], followed)]
    outer = leaves(operand.dims[divided[0]])[0]
    if len(divided) > 1 or outer not in axes:
        return None
    return PassedTensor(place, divided[0], axes[outer], is_output)


def _notes(analysis: Analysis, sharded: Mapping[str, ShardedParameter]) -> Iterator[str]:
    for experts in routed_experts(analysis):
        count = sum(name in sharded for name in experts.parameters)
        how = "split inside of each" if count == len(experts.parameters) else "left whole"
        if 0 < count < len(experts.parameters):
            how = "split inside of each in part"
        yield f"experts of {experts.module}: {how}"
    for name, times in analysis.trace.unknown.items():
        yield f"{name} has no rule: what it touches is whole ({times} calls)"
    for name, times in analysis.trace.guessed.items():
        yield f"{name} looks at data, which the analysis has not: it went on with a guess ({times})"


def _sharded(analysis: Analysis, choice: Selection) -> dict[str, ShardedParameter]:
    found: dict[str, ShardedParameter] = {}
    for number, candidate in enumerate(choice.chosen):
        for member in candidate.members:
            facts = analysis.parameters[member.parameter]
            found[member.parameter] = ShardedParameter(
                member.parameter,
                facts.names,
                facts.shape,
                member.dim,
                _one_by_one(member.sections)
                if facts.name.rpartition(".")[0] in analysis.trace.attentions
                else member.sections,
                member.style,
                number,
                _why(candidate, member),
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
        (other.parameter for other in candidate.members if other.style in {"row", "expert"}), ""
    )
    if member.style == "expert":
        return f"{parts} inside of each expert, which nothing needs together"
    return f"{parts} that nothing needs together before {summed} sums over them"


def _one_by_one(sections: Sequence[Section]) -> tuple[Section, ...]:
    """Split q, k and v of torch's attention into separate sections: it runs as three layers."""
    return tuple(
        Section(1, section.count, section.inner)
        for section in sections
        for _ in range(section.outer)
    )


def _axis(analysis: Analysis, candidate: ShardableDim) -> PlannedDim:
    names = tuple(member.parameter for member in candidate.members)
    blocks = tuple(
        block for block in analysis.blocks if any(name.startswith(f"{block}.") for name in names)
    )
    if blocks and not all(
        name.startswith(tuple(f"{block}." for block in blocks)) for name in names
    ):
        blocks = (*blocks, OUTSIDE)
    return PlannedDim(candidate.atom.size, names, blocks)


def _attributes(analysis: Analysis, followed: set[SymbolicDim]) -> list[SizeAttribute]:
    """Return integers of modules that are a product of neighbouring axes, one of them divided.

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
            for start, end in combinations(range(len(atoms) + 1), 2):
                part = atoms[start:end]
                if axes_of([part], followed) and known.issuperset(part):
                    sizes.setdefault(use.module, set()).add(prod(atom.size for atom in part))
    return [
        SizeAttribute(module, name, value)
        for module, values in analysis.integers.items()
        for name, value in values.items()
        if value in sizes.get(module, set()) and not _tells_apart(analysis, sizes, module, name)
    ]


def _tells_apart(analysis: Analysis, sizes: Mapping[str, set[int]], module: str, name: str) -> bool:
    """Whether an integer differs between modules of one class although their sizes do not."""
    kind = analysis.classes.get(module)
    twins = [twin for twin in sizes if analysis.classes.get(twin) is kind]
    values = {twin: analysis.integers[twin].get(name) for twin in twins}
    if len(set(values.values())) == 1:
        return False
    own = {frozenset(sizes[twin]): value for twin, value in values.items()}
    return any(
        value not in sizes[twin] or value != own[frozenset(sizes[twin])]
        for twin, value in values.items()
    )


def _whole(analysis: Analysis, size: int, choice: Selection, sharded: set[str]) -> list[Unsharded]:
    roles = Roles(analysis)
    where = places(analysis)
    chosen = {axis.atom for axis in choice.chosen}
    reasons: dict[str, dict[str, None]] = {}
    for atom, found in where.items():
        why = choice.refused.get(atom) or why_not(atom, found, roles, size)
        if not why and atom not in chosen:
            why = "another axis of the same parameters has more"
        for member in found:
            if why:
                reasons.setdefault(member.parameter, {}).setdefault(why)
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
    place = {item: number for number, item in enumerate(items)}
    chosen: list[_Item] = []
    for component in _components(items, conflicts):
        component.sort(key=place.__getitem__)
        if len(component) <= EXACT_UP_TO:
            chosen += _heaviest(component, weights, conflicts)
        else:
            chosen += _greedy(component, weights, conflicts)
    return sorted(chosen, key=place.__getitem__)


def _components(items: Sequence[_Item], conflicts: Mapping[_Item, set[_Item]]) -> list[list[_Item]]:
    """Group items that conflicts connect, directly or through others."""
    components: list[list[_Item]] = []
    seen: set[_Item] = set()
    for start in items:
        component, waiting = [], [start]
        while waiting:
            item = waiting.pop()
            if item not in seen:
                seen.add(item)
                component.append(item)
                waiting += conflicts.get(item, set())
        if component:
            components.append(component)
    return components


def _heaviest(
    items: Sequence[_Item], weights: Mapping[_Item, int], conflicts: Mapping[_Item, set[_Item]]
) -> list[_Item]:
    """Return the heaviest selection, by trying each item in it and outside of it."""
    if not items:
        return []
    first, *rest = items
    without = conflicts.get(first, set())
    taken = [
        first, *_heaviest([item for item in rest if item not in without], weights, conflicts)
    ]  # fmt: skip
    if not without & set(rest):
        return taken
    left = _heaviest(rest, weights, conflicts)
    return taken if _weight(taken, weights) >= _weight(left, weights) else left


def _greedy(
    items: Sequence[_Item], weights: Mapping[_Item, int], conflicts: Mapping[_Item, set[_Item]]
) -> list[_Item]:
    chosen: set[_Item] = set()
    for item in sorted(items, key=lambda item: -weights[item]):
        if not conflicts.get(item, set()) & chosen:
            chosen.add(item)
    return [item for item in items if item in chosen]


def _weight(items: Sequence[_Item], weights: Mapping[_Item, int]) -> int:
    return sum(weights[item] for item in items)


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
        size: Number of ranks of the tensor axis.
        loss_parallel: Whether logits are divided by tokens: ``"auto"`` if possible, True, False.
        sequence_parallel: Whether the sequence is divided between blocks.
        wanted: Style, or ``whole``, by name pattern: see ``with_user_plan``.

    Raises:
        ConfigError: If an option is not possible.
    """
    with_heads = loss_parallel is not False
    choice = _choose(analysis, size, wanted or {}, with_heads=with_heads)
    products = Roles(analysis).products
    heads = [
        axis
        for axis in choice.chosen
        if axis.is_vocabulary and not axis.parameters.isdisjoint(products)
    ]
    if loss_parallel is True and not heads:
        why = next(iter(choice.refused.values()), "no loss over tokens was found")
        raise ConfigError(
            f"loss_parallel=True, but no logits can be divided over {size} ranks: {why}. "
            f"Set loss_parallel='auto'."
        )
    plan = replace(plan_of(analysis, size, choice), divides_logits=with_heads)
    return _with_sequence(analysis, choice, plan) if sequence_parallel else plan


def _with_sequence(analysis: Analysis, choice: Selection, plan: TensorPlan) -> TensorPlan:
    """Return a plan that also divides the sequence between blocks, with all consequences."""
    outputs = analysis.trace.module_outputs
    summed = {operand.key for name in plan.boundaries for operand in outputs.get(name, {}).values()}
    # A balancing loss may choose once more, outside of blocks.
    mixtures = {
        experts.module: summed
        for experts in routed_experts(analysis)
        if any(experts.module.startswith(f"{block}.") for block in analysis.blocks)
    }
    styles = {name: parameter.style for name, parameter in plan.sharded.items()}
    try:
        division = divide_sequence(analysis, styles, choice.followed, mixtures)
    except NoSequence as why:
        raise ConfigError(
            f"sequence_parallel=True, but {why}. Set sequence_parallel=False."
        ) from None
    gathered = {
        name
        for name in plan.boundaries
        if any(operand.key in division.gathered for operand in outputs.get(name, {}).values())
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
    taken = {axis.atom for axis in tokens} | set(refused)
    axes = [axis for axis in candidates(analysis, size) if axis.atom not in taken]
    overrides = read_overrides(analysis, [*axes, *tokens], size, wanted)
    refused.update(overrides.whole)
    forced = {axis.atom: axis for axis in overrides.forced}
    others = [axis for axis in (*axes, *tokens) if axis.atom not in forced]
    fixed = {name for axis in forced.values() for name in axis.parameters}
    order = {name: number for number, name in enumerate(analysis.parameters)}
    items = sorted(
        [*forced.values(), *(axis for axis in others if not axis.parameters & fixed)],
        key=lambda axis: (order[axis.members[0].parameter], axis.members[0].dim),
    )
    while True:
        usable = [axis for axis in items if axis.atom not in refused]
        chosen = choose(usable, {axis: axis.weight for axis in usable}, _conflicts(usable))
        sharded = {name: axis.atom for axis in chosen for name in axis.parameters}
        styles = {m.parameter: m.style for axis in chosen for m in axis.members}
        followed = [axis.atom for axis in chosen if not axis.is_vocabulary]
        flow = Follower(analysis, sharded, followed, styles).follow()
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
    """Return, for each axis, the axes that divide one of its parameters too."""
    by_parameter: dict[str, list[ShardableDim]] = {}
    for axis in items:
        for name in axis.parameters:
            by_parameter.setdefault(name, []).append(axis)
    conflicts: dict[ShardableDim, set[ShardableDim]] = {}
    for several in by_parameter.values():
        for axis in several:
            conflicts.setdefault(axis, set()).update(set(several) - {axis})
    return conflicts


def with_user_plan(plan: TensorPlan, analysis: Analysis, mapping: Mapping[str, str]) -> TensorPlan:
    """Return a plan with a user's mapping applied; the rest changes as little as possible.

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
