"""Vocabularies, which may be divided unevenly, and routed experts, whose sequence is not divided.

``vocabularies`` finds the axes of tokens: tables and heads of which each rank may have some rows.
Their number need not divide: nothing between a lookup and a loss needs equal parts, so the first
ranks have one token more than the others, and no table is padded.

``routed_experts`` recognizes routers: a top-k of several scores, and matrices to choose from. Their
division is not special: the analysis finds the dims inside every expert. But the plan reports
whether they are whole or split, and their sequence is not divided: a router that sees some of the
tokens would compute its losses from those alone, without an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.symbolic_dims import SymbolicDim
from boltmesh.strategies.tensor.candidates import (
    DimPosition,
    Member,
    Roles,
    ShardableDim,
    places,
    section_pattern,
)

MIN_SHARE = 0.1
"""A table without a head is divided from this share of the model on: each lookup costs a sum."""

_OF_LOSSES = {
    "_log_softmax", "_softmax", "log_softmax", "nll_loss2d_forward", "nll_loss_forward", "softmax",
}  # fmt: skip


def vocabularies(
    analysis: Analysis, size: int, *, with_heads: bool
) -> tuple[list[ShardableDim], dict[SymbolicDim, str]]:
    """Return the axes of tokens that can be divided, and why others cannot.

    Args:
        analysis: Analysis of the model.
        size: Ranks.
        with_heads: Whether logits may be divided; else only tables that are not heads too.
    """
    found, refused = [], {}
    roles = Roles(analysis)
    lengths = {
        atom.size
        for atom, where in places(analysis).items()
        if with_heads and _is_head(analysis, atom, where, roles)
    }
    for atom, where in places(analysis).items():
        is_head = _is_head(analysis, atom, where, roles)
        if not is_head and not _is_table(atom, where, roles):
            continue
        refusal = ""
        if is_head and not with_heads:
            refusal = "logits are to be whole"
        elif not is_head and atom.size not in lengths and _share(analysis, where) < MIN_SHARE:
            refusal = f"a table of {_share(analysis, where):.1%} of the model is not worth a sum"
        elif strays := [each.parameter for each in where if each.parameter in roles.strays]:
            user = roles.strays[strays[0]] or "the model"
            refusal = f"{strays[0]} is used outside of its module, by {user}"
        elif atom.size < size:
            refusal = f"{atom.size} tokens are fewer than {size} ranks"
        if refusal:
            refused[atom] = refusal
            continue
        members = tuple(
            Member(each.parameter, each.dim, section_pattern(each), "vocabulary") for each in where
        )
        weight = sum(analysis.parameters[each.parameter].elements for each in members)
        found.append(ShardableDim(atom, members, weight, is_vocabulary=True))
    return found, refused


def _is_plain(where: Sequence[DimPosition]) -> bool:
    """Whether its rows are tokens and nothing else."""
    return all(each.dim == 0 and each.rows == ((each.rows[0][0],),) for each in where)


def _is_head(
    analysis: Analysis, atom: SymbolicDim, where: Sequence[DimPosition], roles: Roles
) -> bool:
    """Whether a softmax is taken over a matrix's output, and it has more rows than columns."""
    matrices = [each.parameter for each in where if each.parameter in roles.products]
    return (
        bool(matrices)
        and _is_plain(where)
        and any(reason.operator in _OF_LOSSES for reason in atom.reasons)
        and not any(roles.is_row(each.parameter, atom) for each in where)
        and all(
            len(shape) == 2 and shape[0] >= shape[1]
            for shape in (analysis.parameters[each].shape for each in matrices)
        )
    )


def _is_table(atom: SymbolicDim, where: Sequence[DimPosition], roles: Roles) -> bool:
    return (
        not atom.is_whole
        and _is_plain(where)
        and all(each.parameter in roles.tables - roles.products for each in where)
    )


def _share(analysis: Analysis, where: Sequence[DimPosition]) -> float:
    all_elements = sum(each.elements for each in analysis.parameters.values())
    return sum(analysis.parameters[each.parameter].elements for each in where) / all_elements


@dataclass(frozen=True)
class RoutedExperts:
    """Experts of one router."""

    module: str
    """The module that contains both."""
    parameters: tuple[str, ...]


def routed_experts(analysis: Analysis) -> tuple[RoutedExperts, ...]:
    """Return the experts of every router, in the order in which they run."""
    stacked = _stacked(analysis)
    found: dict[str, RoutedExperts] = {}
    for step in analysis.trace.steps:
        if step.operator != "topk":
            continue
        module = step.module
        while module and not any(name.startswith(f"{module}.") for name in stacked):
            module = module.rpartition(".")[0]
        names = tuple(name for name in stacked if name.startswith(f"{module}."))
        if module and names and module not in analysis.blocks:
            found.setdefault(module, RoutedExperts(module, names))
    return tuple(found.values())


def _stacked(analysis: Analysis) -> list[str]:
    """Matrices of several experts in one parameter, or those of equal modules in a list."""
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
