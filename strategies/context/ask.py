"""Finds by the axis analysis what a function does along the sequence of its operands.

The function is called once on fake tensors of whole shapes. Each cut operand gets a symbolic dim
of its own for its sequence; what the analysis says of it is the answer, kept by shapes:

=======================================  ==================================================
its sequence                             answer
=======================================  ==================================================
is needed whole, or was divided          gather this operand, and ask again
meets another one in one output          gather the operand that came later
is in no output                          it was summed over: gather
is united with another operand's         both run in one division of positions
is united with a dim of a whole operand  that operand is cut there
is in an output                          the output is cut there
=======================================  ==================================================
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from boltmesh.strategies.context.cut import CutTensor
from boltmesh.strategies.tensor.analysis.analyse import AnalysisMode
from boltmesh.strategies.tensor.analysis.symbolic_dims import (
    Dim,
    SymbolicDim,
    leaves,
    new_dim,
    representative,
)
from boltmesh.strategies.tensor.analysis.trace import DimTrace, of_parameters
from boltmesh.strategies.torch_compat.autograd import unrecorded
from boltmesh.strategies.torch_compat.tensors import fake_tensors, subclasses_unasked, tree_leaves


@dataclass(frozen=True)
class SequenceDim:
    """A dim that has the sequence of some operands."""

    operands: tuple[int, ...]
    """Places of cut operands with this sequence."""
    dim: int
    num_outer: int
    num_inner: int


@dataclass(frozen=True)
class Answer:
    """Effect of a function along the sequences of its operands."""

    gathers: Mapping[int, str] = field(default_factory=dict)
    """Why an operand has to be whole, by its place; the rest holds where there is none."""
    inputs: Mapping[int, Sequence[SequenceDim]] = field(default_factory=dict)
    """By place of a tensor operand."""
    outputs: Mapping[int, Sequence[SequenceDim]] = field(default_factory=dict)
    """By place among the leaves of the result."""
    draws: bool = False
    """Whether random numbers are drawn for something cut."""

    @cached_property
    def leaders(self) -> Mapping[int, int]:
        """The operand in whose division of positions each cut operand takes part."""
        found: dict[int, int] = {}
        for several in (*self.inputs.values(), *self.outputs.values()):
            for each in several:
                for operand in each.operands:
                    found.setdefault(operand, min(each.operands))
        return found

    @cached_property
    def cut_outputs(self) -> Mapping[int, SequenceDim]:
        """The sequence of each output that has one."""
        return {place: several[0] for place, several in self.outputs.items() if several}


class Call:
    """A function and its arguments, taken apart into leaves.

    Lists, tuples and dicts of arguments are taken apart, too.
    """

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func = func
        self.leaves: list[Any] = []
        self._spec = (
            tuple(map(self._flat, args)),
            tuple((name, self._flat(each)) for name, each in kwargs.items()),
        )

    def _flat(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value), tuple(map(self._flat, value))
        if type(value) is dict:
            return dict, tuple((key, self._flat(each)) for key, each in value.items())
        self.leaves.append(value)
        return None

    def run(self, values: Sequence[Any]) -> Any:
        """Call the function with other leaves."""
        rest = iter(values)
        args = [_built(each, rest) for each in self._spec[0]]
        kwargs = {name: _built(each, rest) for name, each in self._spec[1]}
        return self.func(*args, **kwargs)

    @property
    def key(self) -> Any:
        """Calls with equal keys have equal answers."""
        found: list[Any] = [self.func, self._spec]
        for each in self.leaves:
            if isinstance(each, CutTensor):
                local = each.local
                found.append((tuple(local.shape), local.dtype, each.cut_dim, each.positions.length,
                              each.num_outer, each.num_inner))  # fmt: skip
            elif isinstance(each, Tensor):
                found.append((tuple(each.shape), each.dtype))
            elif isinstance(each, (int, float, str, type(None), torch.dtype, torch.device)):
                found.append((type(each), each))
            else:
                found.append(repr(each))
        return tuple(found)


def _built(spec: Any, leaves: Iterator[Any]) -> Any:
    """Return an argument with the next leaves."""
    if spec is None:
        return next(leaves)
    kind, parts = spec
    if kind is dict:
        return {key: _built(each, leaves) for key, each in parts}
    return kind(_built(each, leaves) for each in parts)


_answers: dict[Any, Answer] = {}

_MOST_ANSWERS = 20_000


def ask(call: Call) -> Answer:
    """Return what a function does along the sequences of its operands."""
    key = call.key
    known = _answers.get(key)
    if known is None:
        if len(_answers) >= _MOST_ANSWERS:  # sequences of ever new lengths
            _answers.clear()
        with subclasses_unasked(), unrecorded():
            known = _answers[key] = _asked(call)
    return known


def _asked(call: Call) -> Answer:
    mode, trace = fake_tensors(), of_parameters({}, frozenset())
    atoms: dict[int, SymbolicDim] = {}
    values = list(call.leaves)
    for place, each in enumerate(call.leaves):
        if not isinstance(each, Tensor):
            continue
        with mode:
            values[place] = torch.empty(each.shape, dtype=each.dtype, device=each.device)
        dims = [new_dim(size) for size in each.shape]
        if isinstance(each, CutTensor):
            atoms[place] = SymbolicDim(each.positions.length)
            dims[each.cut_dim] = (
                SymbolicDim(each.num_outer),
                atoms[place],
                SymbolicDim(each.num_inner),
            )
        trace.set(values[place], dims)
    given = {trace.operand(each).key for each in values if isinstance(each, Tensor)}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), AnalysisMode(trace, set()):
            result = call.run(values)
    except Exception as error:  # noqa: BLE001 - code that needs values may raise anything
        why = f"cannot be run without data ({type(error).__name__})"
        return Answer(dict.fromkeys(atoms, why))
    if getattr(call.func, "has_own_backward", False):
        used = {each.key for step in trace.steps for each in step.inputs}
        if any(isinstance(each, Tensor) and trace.operand(each).key not in used for each in values):
            return Answer(dict.fromkeys(atoms, "keeps a tensor for its own backward pass alone"))
    inputs = {
        place: _sequences(trace.dims(each), atoms)
        for place, each in enumerate(values)
        if isinstance(each, Tensor)
    }
    outputs = {
        place: _sequences(trace.dims(each), atoms)
        for place, each in enumerate(tree_leaves(result))
        if isinstance(each, Tensor)
    }
    gathers = _gathers(atoms, outputs)
    if not gathers and _makes_positions(trace, given, atoms):
        gathers = dict.fromkeys(atoms, "makes positions of its own")
    draws = any(_sequences(each.dims, atoms) for each in trace.draws)
    return Answer(gathers, inputs, outputs, draws)


def _gathers(
    atoms: Mapping[int, SymbolicDim], outputs: Mapping[int, Sequence[SequenceDim]]
) -> dict[int, str]:
    why: dict[int, str] = {}
    for place, atom in atoms.items():
        found = representative(atom)
        if atom.size != 1 and (found.is_whole or found.form is not None):
            why[place] = "looks along the sequence"
    for several in outputs.values():
        seen: set[int] = set()
        for each in several:
            if seen & set(each.operands):
                why.setdefault(max(each.operands), "meets itself")
            elif seen:
                why.setdefault(max({*seen, *each.operands}), "meets another sequence")
            seen.update(each.operands)
    shown = {place for each in outputs.values() for one in each for place in one.operands}
    if outputs:
        for place in atoms.keys() - shown:
            why.setdefault(place, "sums over the sequence")
        partial = [each for each in outputs.values() if not each]
        if partial and not why and shown:
            why.update(dict.fromkeys(atoms, "gives something whole beside"))
    return why


def _makes_positions(trace: DimTrace, given: set[int], atoms: Mapping[int, SymbolicDim]) -> bool:
    """Whether the function meets the sequence with a tensor that it did not get as an argument.

    Such as an ``arange`` of its length, which would begin at 0 on every rank.
    """
    known = set(given)
    for step in trace.steps:
        for each in step.inputs:
            if each.key not in known and not each.is_zero and _sequences(each.dims, atoms):
                return True
        known.update(each.key for each in step.outputs)
    return False


def _sequences(dims: Sequence[Dim], atoms: Mapping[int, SymbolicDim]) -> list[SequenceDim]:
    found = []
    for dim, row in enumerate(dims):
        atoms_of_row = leaves(row)
        for place, each in enumerate(atoms_of_row):
            same = representative(each)
            operands = tuple(at for at, atom in atoms.items() if representative(atom) is same)
            if operands:
                num_outer = prod(atom.size for atom in atoms_of_row[:place])
                num_inner = prod(atom.size for atom in atoms_of_row[place + 1 :])
                found.append(SequenceDim(operands, dim, num_outer, num_inner))
    return found
