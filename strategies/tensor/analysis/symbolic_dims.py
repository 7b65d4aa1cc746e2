"""The logical axes of a model: what they are made of, and which of them nothing needs whole.

An atom is one indivisible axis, such as the heads of a block or the channels of one head. Each
dimension of a tensor is a row of atoms, outer to inner: ``[batch, tokens]`` after a flatten,
``[heads, channels]`` in the output of a projection. Operators say that two atoms are the same one,
that an atom is a product of others (a view), that it is a row of sections (a split), or that they
need it whole. What nobody needed whole may be divided over ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Literal, TypeAlias

from typing_extensions import override


@dataclass(frozen=True)
class Reason:
    """What needed an axis whole."""

    operator: str
    module: str = ""
    """In whose forward; empty for the root's."""

    @override
    def __str__(self) -> str:
        name = self.operator.removeprefix("native").strip("_")
        return f"{name} in {self.module}" if self.module else name


@dataclass(eq=False)
class SymbolicDim:
    """One logical axis. Two that turn out to be the same are united: see ``representative``."""

    size: int
    reasons: list[Reason] = field(default_factory=list)
    """Why it has to be whole, each operator once; empty while nothing needs that."""
    parent: "SymbolicDim | None" = None
    form: Literal["product", "sections"] | None = None
    parts: "Dim" = ()
    """Of a product, outer to inner; or sections, one after the other."""

    @property
    def is_whole(self) -> bool:
        """Whether something needs it whole."""
        return bool(self.reasons)


Dim: TypeAlias = tuple[SymbolicDim, ...]
"""A dimension of a tensor, outer to inner."""


def new_dim(size: int) -> Dim:
    """A dimension of which nothing is known."""
    return (SymbolicDim(size),)


def representative(atom: SymbolicDim) -> SymbolicDim:
    """Return the one that stands for all atoms united with this one."""
    while atom.parent is not None:
        atom = atom.parent
    return atom


def leaves(dim: Sequence[SymbolicDim]) -> Dim:
    """A dimension with products taken apart and without atoms of size 1. Sections stay one atom."""
    found: list[SymbolicDim] = []
    for each in map(representative, dim):
        if each.size == 1:
            continue
        if each.form == "product":
            found += leaves(each.parts)
        else:
            found.append(each)
    return tuple(found)


def length(dim: Sequence[SymbolicDim]) -> int:
    """Elements along a dimension."""
    return prod(each.size for each in dim)


def keep_whole(dim: Sequence[SymbolicDim], reason: Reason) -> None:
    """Say that an operator needs every atom of a dimension whole, and all that they consist of."""
    for each in map(representative, dim):
        if all(reason.operator != known.operator for known in each.reasons):
            each.reasons.append(reason)
        keep_whole(each.parts, reason)


def part(atom: SymbolicDim, size: int) -> SymbolicDim:
    """A new part of an atom, whole where the atom has to be."""
    return SymbolicDim(size, list(atom.reasons))


def split_product(atom: SymbolicDim, outer: int) -> Dim:
    """Take a leaf apart into ``outer`` rows."""
    inner = atom.size // outer
    parts = (part(atom, outer), part(atom, inner))
    if atom.form is not None:  # sections that are no rows of each other
        keep_whole([atom], Reason("a view over sections"))
        for each in parts:
            each.reasons = list(atom.reasons)
        return parts
    atom.form, atom.parts = "product", parts
    return parts


def unify(one: Sequence[SymbolicDim], other: Sequence[SymbolicDim], reason: Reason) -> None:
    """Say that two dimensions of the same length are the same one.

    Args:
        one: The first.
        other: The second.
        reason: Why what does not fit together has to be whole.
    """
    left, right = list(leaves(one)), list(leaves(other))
    while left and right:
        first, second = representative(left[0]), representative(right[0])
        if first.form == "product":
            left[:1] = leaves([first])
        elif second.form == "product":
            right[:1] = leaves([second])
        elif first.size == second.size:
            unite(first, second, reason)
            del left[0], right[0]
        elif first.size > second.size and first.size % second.size == 0:
            left[:1] = split_product(first, second.size)
        elif second.size > first.size and second.size % first.size == 0:
            right[:1] = split_product(second, first.size)
        else:
            keep_whole(left, reason)
            keep_whole(right, reason)
            return


def unite(one: SymbolicDim, other: SymbolicDim, reason: Reason) -> None:
    """Say that two atoms of the same size are the same one."""
    kept, dropped = representative(one), representative(other)
    if kept is dropped:
        return
    if kept.form is None:
        kept, dropped = dropped, kept
    dropped.parent = kept
    for each in dropped.reasons:
        keep_whole([kept], each)
    if dropped.form is None:
        return
    form, parts = dropped.form, dropped.parts
    dropped.form, dropped.parts = None, ()
    for each in kept.reasons:
        keep_whole(parts, each)
    if form == kept.form == "product":
        unify(kept.parts, parts, reason)
    elif form == kept.form == "sections" and _sizes(parts) == _sizes(kept.parts):
        for mine, theirs in zip(kept.parts, parts, strict=True):
            unite(mine, theirs, reason)
    else:
        keep_whole([kept], reason)
        keep_whole(parts, reason)


def _sizes(dim: Sequence[SymbolicDim]) -> list[int]:
    return [each.size for each in dim]


def regroup(dims: Sequence[Dim], shape: Sequence[int], reason: Reason) -> list[Dim]:
    """Give the atoms of a tensor to the dimensions of a view of it.

    Args:
        dims: Of the tensor.
        shape: Of the view, with as many elements.
        reason: Why atoms that lie across a boundary of the view have to be whole.
    """
    flat = list(leaves([atom for dim in dims for atom in dim]))
    return [_take(flat, size, reason) for size in shape]


def _take(flat: list[SymbolicDim], size: int, reason: Reason) -> Dim:
    """Take the atoms of one dimension from the front of those that are left."""
    taken: list[SymbolicDim] = []
    while size > 1 and flat:
        atom = representative(flat[0])
        if atom.form == "product":
            flat[:1] = leaves([atom])
        elif size % atom.size == 0:
            taken.append(atom)
            size //= atom.size
            del flat[0]
        elif (common := gcd(atom.size, size)) > 1:
            flat[:1] = split_product(atom, common)
        else:
            keep_whole(flat, reason)
            flat.clear()
            taken.append(SymbolicDim(size, [reason]))
            size = 1
    if size > 1:
        taken.append(SymbolicDim(size, [reason]))
    return tuple(taken)


def narrow(dim: Sequence[SymbolicDim], start: int, size: int, reason: Reason) -> Dim:
    """Return ``dim[start : start + size]``, and note the sections that it shows.

    Args:
        dim: The dimension.
        start: First element.
        size: Elements.
        reason: Why a dimension that is cut within an atom has to be whole.
    """
    atoms = leaves(dim)
    if size == 0:
        return new_dim(0)
    if start == 0 and size == length(atoms):
        return tuple(dim)
    inner = length(atoms[1:])
    if not atoms or start % inner or size % inner:
        keep_whole(atoms, reason)
        return (SymbolicDim(size, [reason]),)
    return (_section(atoms[0], start // inner, size // inner, reason), *atoms[1:])


def _section(atom: SymbolicDim, start: int, size: int, reason: Reason) -> SymbolicDim:
    atom = representative(atom)
    if start == 0 and size == atom.size:
        return atom
    if atom.form is None:
        rest = atom.size - start - size
        atom.form = "sections"
        atom.parts = tuple(part(atom, each) for each in (start, size, rest) if each)
        return atom.parts[1 if start else 0]
    if atom.form == "sections":
        base = 0
        for each in atom.parts:
            if base <= start and start + size <= base + each.size:
                return _section(each, start - base, size, reason)
            base += each.size
    keep_whole([atom], reason)
    return SymbolicDim(size, [reason])
