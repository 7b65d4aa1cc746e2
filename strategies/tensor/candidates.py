"""Dims of a model that could be divided, and the reasons why others cannot.

``vocabularies`` finds the axes of tokens: tables and heads of which each rank can hold some rows.
Their number need not divide evenly: nothing between a lookup and a loss needs equal parts. The
first ranks have one token more than the others, and no table is padded.

``routed_experts`` recognizes routers: a top-k of several scores and matrices to choose from. Their
division is ordinary: the analysis finds the dims inside every expert. But the plan reports
whether they are whole or split, and their sequence is not divided: a router that sees some of the
tokens would compute its losses from those alone, without an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.symbolic_dims import (
    Dim,
    SymbolicDim,
    leaves,
    length,
    representative,
)
from boltmesh.strategies.tensor.plan import Section, Style

if TYPE_CHECKING:
    from boltmesh.strategies.tensor.analysis.trace import Lookup, Product, Use

_TAKEN_APART = {"select", "unbind"}
"""Operators that take q, k and v from a projection that has them outside of its heads."""


@dataclass(frozen=True)
class Member:
    """A dimension of a parameter that contains an axis."""

    parameter: str
    dim: int
    sections: tuple[Section, ...]
    style: Style


@dataclass(frozen=True, eq=False)
class ShardableDim:
    """An axis that no operator needs whole."""

    atom: SymbolicDim
    members: tuple[Member, ...]
    weight: int
    """Number of elements of all parameters that it divides."""
    is_vocabulary: bool = False

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the parameters that it divides."""
        return frozenset(each.parameter for each in self.members)


@dataclass(frozen=True)
class DimPosition:
    """Position of an axis in a dimension of a parameter."""

    parameter: str
    dim: int
    rows: tuple[Dim, ...]
    """The sections of the dimension, each a row of atoms."""
    at: tuple[int, ...]
    """Index of the axis in each section; shorter than ``rows`` if it is not in all of them."""


def sections_of(dim: Sequence[SymbolicDim]) -> tuple[Dim, ...]:
    """Return the sections of a parameter's dimension, each a row of indivisible atoms.

    Nested sections, such as the two halves of the channels of a head, are not sections of the
    dimension: they count as one atom, which cannot be divided itself.
    """
    rows: list[Dim] = [()]
    for number, atom in enumerate(map(representative, dim)):
        parts = _sections_of_atom(atom)
        if number and len(parts) > 1:
            parts = ((atom,),)
        rows = [row + part for row in rows for part in parts]
    return tuple(rows)


def _sections_of_atom(atom: SymbolicDim) -> tuple[Dim, ...]:
    if atom.form == "sections":
        return tuple(row for part in atom.parts for row in sections_of([part]))
    if atom.form == "product":
        return sections_of(atom.parts)
    return ((atom,),)


def places(analysis: Analysis) -> dict[SymbolicDim, list[DimPosition]]:
    """Return the positions of each axis, in the order of the model."""
    by_axis: dict[SymbolicDim, list[DimPosition]] = {}
    for name, facts in analysis.parameters.items():
        for number, dim in enumerate(facts.dims):
            rows = sections_of(dim)
            at: dict[SymbolicDim, list[int]] = {}
            for row in rows:
                for place, atom in enumerate(row):
                    if atom.size > 1:
                        at.setdefault(representative(atom), []).append(place)
            for atom, indices in at.items():
                by_axis.setdefault(atom, []).append(DimPosition(name, number, rows, tuple(indices)))
    return by_axis


def section_pattern(place: DimPosition) -> tuple[Section, ...]:
    """Return how a dimension is divided along an axis that each of its sections contains once."""
    return tuple(
        Section(
            prod(atom.size for atom in row[:at]),
            row[at].size,
            prod(atom.size for atom in row[at + 1 :]),
        )
        for row, at in zip(place.rows, place.at, strict=True)
    )


class Roles:
    """How a step used each dimension of each parameter."""

    def __init__(self, analysis: Analysis) -> None:
        trace = analysis.trace
        self.facts = analysis.parameters
        self.tables = {lookup.parameter for lookup in trace.lookups}
        self.products = {product.parameter for product in trace.products}
        self.used = {use.parameter for use in trace.uses}
        self.addends = {use.parameter for use in trace.uses if use.is_addend}
        self.contracted: dict[str, set[SymbolicDim]] = {}
        """Atoms that were summed over in a product with a parameter."""
        self.attentions = trace.attentions
        self.strays = _strays(analysis)
        for product in trace.products:
            self.contracted.setdefault(product.parameter, set()).update(leaves(product.contracted))

    def is_used(self, parameter: str) -> bool:
        """Whether the step used a parameter in a way that can be divided."""
        return parameter in self.tables | self.products | self.used

    def style(self, parameter: str, dim: int, atom: SymbolicDim) -> Style | None:
        """Style of a parameter divided along an axis; None if it is used in several ways."""
        is_table, is_factor = parameter in self.tables, parameter in self.products
        if is_table and dim == 0:
            return "vocabulary"
        if is_table:
            return None if is_factor else "table"
        if not is_factor:
            return "column" if parameter in self.addends else "along"
        if len(self.facts[parameter].shape) > 2 and not self._is_convolution(parameter):
            return "expert"
        return "row" if self.is_row(parameter, atom) else "column"

    def is_row(self, parameter: str, atom: SymbolicDim) -> bool:
        """Whether an axis of a parameter is summed over."""
        return atom in self.contracted.get(parameter, set())

    def _is_convolution(self, parameter: str) -> bool:
        # Experts are stacked in the first dimension, over which products do not sum; the other
        # dimensions of a kernel are spatial.
        return any(
            "convolution" in str(reason)
            for dim in self.facts[parameter].dims[2:]
            for atom in leaves(dim)
            for reason in atom.reasons
        )


def _strays(analysis: Analysis) -> dict[str, str]:
    """Return parameters that another module than their own uses, with that module.

    The other module would get a part although it expects the full parameter. torch's attention is
    replaced by our implementation, which handles its output layer.
    """
    trace = analysis.trace
    users: dict[str, str] = {}
    records: list[Product | Use | Lookup] = [*trace.products, *trace.uses, *trace.lookups]
    for record in records:
        owners = {name.rpartition(".")[0] for name in analysis.parameters[record.parameter].names}
        is_own = record.module in owners or (
            record.module in trace.attentions
            and any(owner.startswith(f"{record.module}.") for owner in owners)
        )
        if not is_own:
            users.setdefault(record.parameter, record.module)
    return users


def why_not(
    atom: SymbolicDim,
    found: Sequence[DimPosition],
    roles: Roles,
    size: int,
    *,
    trusted: frozenset[str] = frozenset(),
) -> str:
    """Return why an axis cannot be divided by ``size``; empty if it can.

    Args:
        atom: The axis.
        found: Its positions.
        roles: Uses of the parameters.
        size: Number of ranks.
        trusted: Operators without a rule for which the user is responsible. If one uses an axis,
            the other dims with that axis are unknown.
    """
    reasons = [reason for reason in atom.reasons if reason.operator not in trusted]
    if reasons:
        return f"{reasons[0]} needs it whole"
    if atom.form == "sections":
        return "it has sections inside of something else"
    if atom.size % size:
        return f"{atom.size} is no multiple of {size}"
    unused = [position.parameter for position in found if not roles.is_used(position.parameter)]
    if unused:
        return f"the step does not use {unused[0]}"
    for position in found:
        if position.parameter in roles.strays:
            where = roles.strays[position.parameter] or "the model"
            return f"{position.parameter} is used outside of its module, by {where}"
        if why := _why_not_there(position, roles):
            return why
    names = [position.parameter for position in found]
    if len(set(names)) < len(names):
        return "two dimensions of one parameter are the same axis"
    styles = [roles.style(position.parameter, position.dim, atom) for position in found]
    if None in styles:
        return "a parameter is used in two ways"
    if atom.reasons:
        return ""
    rows = [roles.is_row(position.parameter, atom) for position in found]
    if not any(rows):
        return "nothing sums over it"
    if not any(
        style == "table" or (position.parameter in roles.products and not row)
        for position, style, row in zip(found, styles, rows, strict=True)
    ):
        return "what it is multiplied with is whole"
    return ""


def _why_not_there(place: DimPosition, roles: Roles) -> str:
    if len(place.at) != len(place.rows):
        return f"not every section of {place.parameter} has it"
        # In torch's attention, keys and values may be one section, and queries another one.
    may_be_outer = len(place.rows) == 1 or place.parameter.rpartition(".")[0] in roles.attentions
    for row, at in zip(place.rows, place.at, strict=True):
        outer = row[:at]
        is_taken_apart = may_be_outer and all(
            any(reason.operator in _TAKEN_APART for reason in atom.reasons) for atom in outer
        )
        if length(outer) > 1 and not is_taken_apart:
            return f"{place.parameter} has something else outside of it"
    return ""


def candidates(analysis: Analysis, size: int) -> Iterator[ShardableDim]:
    """Yield the axes that can be divided by ``size``, in the order of the model."""
    roles = Roles(analysis)
    for atom, found in places(analysis).items():
        if not why_not(atom, found, roles, size):
            yield candidate_of(analysis, atom, found, roles)


def candidate_of(
    analysis: Analysis, atom: SymbolicDim, found: Sequence[DimPosition], roles: Roles
) -> ShardableDim:
    """Describe an axis that can be divided."""
    members = []
    for position in found:
        style = roles.style(position.parameter, position.dim, atom)
        assert style is not None
        members.append(Member(position.parameter, position.dim, section_pattern(position), style))
    owners = {member.parameter.rpartition(".")[0] for member in members if member.style == "column"}
    members = [
        replace(member, style="column")
        if member.style == "along" and member.parameter.rpartition(".")[0] in owners
        else member
        for member in members
    ]  # a bias that is added by an operator of its own
    weight = sum(analysis.parameters[member.parameter].elements for member in members)
    return ShardableDim(atom, tuple(members), weight)


MIN_SHARE = 0.1
"""Least share of the model for which a table without a head is divided: each lookup costs a sum."""

_OF_LOSSES = {
    "_log_softmax", "_softmax", "log_softmax", "nll_loss2d_forward", "nll_loss_forward", "softmax",
}  # fmt: skip


def vocabularies(
    analysis: Analysis, size: int, *, with_heads: bool
) -> tuple[list[ShardableDim], dict[SymbolicDim, str]]:
    """Return the axes of tokens that can be divided, and why others cannot.

    Args:
        analysis: Analysis of the model.
        size: Number of ranks.
        with_heads: Whether logits may be divided; else only tables that are not heads too.
    """
    divisible, refused = [], {}
    roles = Roles(analysis)
    found = places(analysis)
    heads = {atom for atom, where in found.items() if _is_head(analysis, atom, where, roles)}
    lengths = {atom.size for atom in heads if with_heads}
    for atom, where in found.items():
        is_head = atom in heads
        if not is_head and not _is_table(atom, where, roles):
            continue
        refusal = ""
        if is_head and not with_heads:
            refusal = "logits are to be whole"
        elif not is_head and atom.size not in lengths and _share(analysis, where) < MIN_SHARE:
            refusal = f"a table of {_share(analysis, where):.1%} of the model is not worth a sum"
        elif strays := [
            position.parameter for position in where if position.parameter in roles.strays
        ]:
            user = roles.strays[strays[0]] or "the model"
            refusal = f"{strays[0]} is used outside of its module, by {user}"
        elif atom.size < size:
            refusal = f"{atom.size} tokens are fewer than {size} ranks"
        if refusal:
            refused[atom] = refusal
            continue
        members = tuple(
            Member(position.parameter, position.dim, section_pattern(position), "vocabulary")
            for position in where
        )
        weight = sum(analysis.parameters[member.parameter].elements for member in members)
        divisible.append(ShardableDim(atom, members, weight, is_vocabulary=True))
    return divisible, refused


def _is_plain(where: Sequence[DimPosition]) -> bool:
    """Whether the rows of all parameters are tokens and nothing else."""
    return all(
        position.dim == 0 and position.rows == ((position.rows[0][0],),) for position in where
    )


def _is_head(
    analysis: Analysis, atom: SymbolicDim, where: Sequence[DimPosition], roles: Roles
) -> bool:
    """Whether a softmax is taken over a matrix's output, and it has more rows than columns."""
    matrices = [position.parameter for position in where if position.parameter in roles.products]
    return (
        bool(matrices)
        and _is_plain(where)
        and any(reason.operator in _OF_LOSSES for reason in atom.reasons)
        and not any(roles.is_row(position.parameter, atom) for position in where)
        and all(
            len(shape) == 2 and shape[0] >= shape[1]
            for shape in (analysis.parameters[name].shape for name in matrices)
        )
    )


def _is_table(atom: SymbolicDim, where: Sequence[DimPosition], roles: Roles) -> bool:
    return (
        not atom.is_whole
        and _is_plain(where)
        and all(position.parameter in roles.tables - roles.products for position in where)
    )


def _share(analysis: Analysis, where: Sequence[DimPosition]) -> float:
    all_elements = sum(facts.elements for facts in analysis.parameters.values())
    return (
        sum(analysis.parameters[position.parameter].elements for position in where) / all_elements
    )


@dataclass(frozen=True)
class RoutedExperts:
    """The experts of one router."""

    module: str
    """The module that contains the router and its experts."""
    parameters: tuple[str, ...]


def routed_experts(analysis: Analysis) -> tuple[RoutedExperts, ...]:
    """Return the experts of every router, in the order in which they run."""
    stacked = _stacked(analysis)
    by_module: dict[str, RoutedExperts] = {}
    for step in analysis.trace.steps:
        if step.operator != "topk":
            continue
        module = step.module
        while module and not any(name.startswith(f"{module}.") for name in stacked):
            module = module.rpartition(".")[0]
        names = tuple(name for name in stacked if name.startswith(f"{module}."))
        if module and names and module not in analysis.blocks:
            by_module.setdefault(module, RoutedExperts(module, names))
    return tuple(by_module.values())


def _stacked(analysis: Analysis) -> list[str]:
    """Return stacked matrices of several experts, and matrices of equal modules in a list."""
    copies: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for name, facts in analysis.parameters.items():
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part.isdigit() and ".".join(parts[: place + 1]) not in analysis.blocks:
                around, inside = ".".join(parts[:place]), ".".join(parts[place + 1 :])
                copies.setdefault((around, inside, facts.shape), []).append(name)
    several = {name for names in copies.values() if len(names) > 1 for name in names}
    return [
        name
        for name, facts in analysis.parameters.items()
        if len(facts.shape) == 3 or name in several
    ]
