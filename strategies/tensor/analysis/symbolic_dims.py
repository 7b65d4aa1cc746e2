"""The logical axes of a model: their structure, and which of them can be divided.

An atom is one indivisible axis, such as the heads of a block or the channels of one head. Each
dim of a tensor is a sequence of atoms, outer to inner: ``[batch, tokens]`` after a flatten,
``[heads, channels]`` in the output of a projection. Operators unify two atoms, make an atom a
product of others (a view) or a sequence of sections (a split), or need an atom whole. An atom that
no operator needed whole may be divided over ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Literal, TypeAlias

from typing_extensions import override


@dataclass(frozen=True)
class Reason:
    """Why an axis is needed whole."""

    operator: str
    module: str = ""
    """Module in whose forward; empty for the root's."""

    @override
    def __str__(self) -> str:
        name = self.operator.removeprefix("native").strip("_")
        return f"{name} in {self.module}" if self.module else name


@dataclass(eq=False)
class SymbolicDim:
    """One logical axis. Unified axes share a ``representative``."""

    size: int
    reasons: list[Reason] = field(default_factory=list)
    """Why it is needed whole, each operator once; empty if it may be divided."""
    parent: "SymbolicDim | None" = None
    form: Literal["product", "sections"] | None = None
    parts: "Dim" = ()
    """Factors of a product, outer to inner; or sections, one after the other."""

    @property
    def is_whole(self) -> bool:
        """Whether it is needed whole."""
        return bool(self.reasons)


Dim: TypeAlias = tuple[SymbolicDim, ...]
"""A dim of a tensor, outer to inner."""


def new_dim(size: int) -> Dim:
    """Return a dim with a new axis."""
    return (SymbolicDim(size),)


def representative(atom: SymbolicDim) -> SymbolicDim:
    """Return the representative of the atoms unified with this one."""
    while atom.parent is not None:
        atom = atom.parent
    return atom


def leaves(dim: Sequence[SymbolicDim]) -> Dim:
    """Return the factors of a dim without those of size 1; a sequence of sections is one atom."""
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
    """Return the size of a dim."""
    return prod(each.size for each in dim)


def keep_whole(dim: Sequence[SymbolicDim], reason: Reason) -> None:
    """Mark every atom of a dim, and their parts, as needed whole."""
    for each in map(representative, dim):
        if all(reason.operator != known.operator for known in each.reasons):
            each.reasons.append(reason)
        keep_whole(each.parts, reason)


def part(atom: SymbolicDim, size: int) -> SymbolicDim:
    """Return a new part of an atom, needed whole if the atom is."""
    return SymbolicDim(size, list(atom.reasons))


def split_product(atom: SymbolicDim, outer: int) -> Dim:
    """Split a leaf into ``outer`` rows."""
    inner = atom.size // outer
    parts = (part(atom, outer), part(atom, inner))
    if atom.form is not None:  # sections that are not rows of each other
        keep_whole([atom], Reason("a view over sections"))
        for each in parts:
            each.reasons = list(atom.reasons)
        return parts
    atom.form, atom.parts = "product", parts
    return parts


def unify(one: Sequence[SymbolicDim], other: Sequence[SymbolicDim], reason: Reason) -> None:
    """Unify two dims of equal length.

    Args:
        one: The first.
        other: The second.
        reason: Why atoms that do not match are needed whole.
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
    """Unify two atoms of equal size."""
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
    """Assign the atoms of a tensor to the dims of a view of it.

    Args:
        dims: Dims of the tensor.
        shape: Shape of the view, with as many elements.
        reason: Why atoms that cross a boundary of the view are needed whole.
    """
    flat = list(leaves([atom for dim in dims for atom in dim]))
    return [_take(flat, size, reason) for size in shape]


def _take(flat: list[SymbolicDim], size: int, reason: Reason) -> Dim:
    """Remove the atoms of one dim from the front of ``flat`` and return them."""
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
    """Return ``dim[start : start + size]``, and record the sections that it implies.

    Args:
        dim: The dimension.
        start: First element.
        size: Elements.
        reason: Why a dim that is cut within an atom is needed whole.
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
