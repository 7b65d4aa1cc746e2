"""Runs a function with a cut argument: by its rule, or by the result of the axis analysis.

A function that needs no operand whole runs on plain local tensors; operands that every rank has
whole are cut where they meet the sequence. An operand that it needs whole is gathered. So every
model gives right results; rules only change memory and bytes.

``ask`` finds by the axis analysis what a function does along the sequence of its operands. The
function is called once on fake tensors of whole shapes. Each cut operand gets a symbolic dim of its
own for its sequence. What the analysis finds for that dim is the answer, cached by shapes:

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.context import attention  # noqa: F401 - registers its rules
from boltmesh.strategies.context.positions import Positions
from boltmesh.strategies.context.rules import CUT_RULES
from boltmesh.strategies.context.seq_shard import (
    SeqShard,
    by_positions,
    make_all_whole,
    make_cut,
    make_whole,
    moved_to,
    part_of,
    run_functions_by,
)
from boltmesh.strategies.tensor.analysis.analyse import AnalysisMode
from boltmesh.strategies.tensor.analysis.symbolic_dims import (
    Dim,
    SymbolicDim,
    leaves,
    new_dim,
    representative,
)
from boltmesh.strategies.tensor.analysis.trace import DimTrace, of_parameters
from boltmesh.strategies.tensor.runtime.vocab_tensor import VocabularyTensor, gathered
from boltmesh.strategies.torch_compat.autograd import unrecorded
from boltmesh.strategies.torch_compat.tensors import (
    fake_tensors,
    subclasses_asked,
    subclasses_unasked,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)


@dataclass(frozen=True)
class SequenceDim:
    """A dim that contains the sequence of some operands."""

    operands: tuple[int, ...]
    """Indices of the cut operands with this sequence, among the leaves of the arguments."""
    dim: int
    num_outer: int
    num_inner: int


@dataclass(frozen=True)
class Answer:
    """Effect of a function along the sequences of its operands."""

    gathers: Mapping[int, str] = field(default_factory=dict)
    """Why operands have to be whole, by index; the other fields count only if this is empty."""
    inputs: Mapping[int, Sequence[SequenceDim]] = field(default_factory=dict)
    """Sequences of each tensor operand, by its index among the leaves of the arguments."""
    outputs: Mapping[int, Sequence[SequenceDim]] = field(default_factory=dict)
    """Sequences of each output, by its index among the leaves of the result."""
    draws: bool = False
    """Whether random numbers are drawn for cut tensors."""

    @cached_property
    def leaders(self) -> Mapping[int, int]:
        """For each cut operand, the operand whose division of positions it gets."""
        found: dict[int, int] = {}
        for several in (*self.inputs.values(), *self.outputs.values()):
            for sequence in several:
                for operand in sequence.operands:
                    found.setdefault(operand, min(sequence.operands))
        return found

    @cached_property
    def cut_outputs(self) -> Mapping[int, SequenceDim]:
        """The sequence of each output that has one."""
        return {place: several[0] for place, several in self.outputs.items() if several}


class Call:
    """A function and its arguments, flattened to leaves.

    Lists, tuples and dicts among the arguments are flattened too.
    """

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func = func
        self.leaves: list[Any] = []
        self._spec = (
            tuple(map(self._flat, args)),
            tuple((name, self._flat(value)) for name, value in kwargs.items()),
        )

    def _flat(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value), tuple(map(self._flat, value))
        if type(value) is dict:
            return dict, tuple((key, self._flat(item)) for key, item in value.items())
        self.leaves.append(value)
        return None

    def run(self, values: Sequence[Any]) -> Any:
        """Call the function with these leaves in place of its own."""
        rest = iter(values)
        args = [_built(spec, rest) for spec in self._spec[0]]
        kwargs = {name: _built(spec, rest) for name, spec in self._spec[1]}
        return self.func(*args, **kwargs)

    @property
    def key(self) -> Any:
        """Key of the cache: calls with equal keys have equal answers."""
        parts: list[Any] = [self.func, self._spec]
        for leaf in self.leaves:
            if isinstance(leaf, SeqShard):
                local = leaf.local
                parts.append((tuple(local.shape), local.dtype, leaf.seq_dim, leaf.positions.length,
                              leaf.num_outer, leaf.num_inner))  # fmt: skip
            elif isinstance(leaf, Tensor):
                parts.append((tuple(leaf.shape), leaf.dtype))
            elif isinstance(leaf, (int, float, str, type(None), torch.dtype, torch.device)):
                parts.append((type(leaf), leaf))
            else:
                parts.append(repr(leaf))
        return tuple(parts)


def _built(spec: Any, leaves: Iterator[Any]) -> Any:
    """Return an argument, built from the next leaves."""
    if spec is None:
        return next(leaves)
    kind, parts = spec
    if kind is dict:
        return {key: _built(part, leaves) for key, part in parts}
    return kind(_built(part, leaves) for part in parts)


_answers: dict[Any, Answer] = {}

_MOST_ANSWERS = 20_000


def ask(call: Call) -> Answer:
    """Return what a function does along the sequences of its operands. Local."""
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
    for place, leaf in enumerate(call.leaves):
        if not isinstance(leaf, Tensor):
            continue
        with mode:
            values[place] = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        dims = [new_dim(size) for size in leaf.shape]
        if isinstance(leaf, SeqShard):
            atoms[place] = SymbolicDim(leaf.positions.length)
            dims[leaf.seq_dim] = (
                SymbolicDim(leaf.num_outer),
                atoms[place],
                SymbolicDim(leaf.num_inner),
            )
        trace.set(values[place], dims)
    given = {trace.operand(value).key for value in values if isinstance(value, Tensor)}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), AnalysisMode(trace, set()):
            result = call.run(values)
    except Exception as error:  # noqa: BLE001 - code that needs values may raise anything
        why = f"cannot be run without data ({type(error).__name__})"
        return Answer(dict.fromkeys(atoms, why))
    if getattr(call.func, "has_own_backward", False):
        used = {operand.key for step in trace.steps for operand in step.inputs}
        if any(
            isinstance(value, Tensor) and trace.operand(value).key not in used for value in values
        ):
            return Answer(dict.fromkeys(atoms, "keeps a tensor for its own backward pass alone"))
    inputs = {
        place: _sequences(trace.dims(value), atoms)
        for place, value in enumerate(values)
        if isinstance(value, Tensor)
    }
    outputs = {
        place: _sequences(trace.dims(leaf), atoms)
        for place, leaf in enumerate(tree_leaves(result))
        if isinstance(leaf, Tensor)
    }
    gathers = _gathers(atoms, outputs)
    if not gathers and _makes_positions(trace, given, atoms):
        gathers = dict.fromkeys(atoms, "makes positions of its own")
    draws = any(_sequences(draw.dims, atoms) for draw in trace.draws)
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
        for sequence in several:
            if seen & set(sequence.operands):
                why.setdefault(max(sequence.operands), "meets itself")
            elif seen:
                why.setdefault(max({*seen, *sequence.operands}), "meets another sequence")
            seen.update(sequence.operands)
    shown = {place for several in outputs.values() for one in several for place in one.operands}
    if outputs:
        for place in atoms.keys() - shown:
            why.setdefault(place, "sums over the sequence")
        partial = [several for several in outputs.values() if not several]
        if partial and not why and shown:
            why.update(dict.fromkeys(atoms, "gives something whole beside"))
    return why


def _makes_positions(trace: DimTrace, given: set[int], atoms: Mapping[int, SymbolicDim]) -> bool:
    """Whether the function combines the sequence with a tensor that is no argument.

    An ``arange`` of its length, for example, would begin at 0 on every rank.
    """
    known = set(given)
    for step in trace.steps:
        for operand in step.inputs:
            if operand.key not in known and not operand.is_zero and _sequences(operand.dims, atoms):
                return True
        known.update(out.key for out in step.outputs)
    return False


def _sequences(dims: Sequence[Dim], atoms: Mapping[int, SymbolicDim]) -> list[SequenceDim]:
    sequence_dims = []
    for dim, row in enumerate(dims):
        atoms_of_row = leaves(row)
        for place, part in enumerate(atoms_of_row):
            same = representative(part)
            operands = tuple(at for at, atom in atoms.items() if representative(atom) is same)
            if operands:
                num_outer = prod(atom.size for atom in atoms_of_row[:place])
                num_inner = prod(atom.size for atom in atoms_of_row[place + 1 :])
                sequence_dims.append(SequenceDim(operands, dim, num_outer, num_inner))
    return sequence_dims


_OF_THE_WHOLE = frozenset({
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_conj", "is_floating_point",
    "is_neg", "is_same_size", "is_signed", "ndimension", "nelement", "numel", "size", "stride",
    "is_contiguous", "__hash__", "storage_offset", "is_inference",
})  # fmt: skip
"""Methods whose result only depends on the shape and type of the whole."""

_ATTRIBUTES_OF_THE_WHOLE = frozenset({
    "device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_mkldnn", "is_mps", "is_mtia",
    "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "itemsize", "layout",
    "names", "nbytes", "ndim", "shape",
})  # fmt: skip
_ATTRIBUTES_OF_THE_PART = frozenset({
    "_backward_hooks", "_base", "_version", "grad_fn", "is_leaf", "output_nr", "requires_grad",
    "retains_grad",
})  # fmt: skip

_WRITES_FIRST = frozenset({
    "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__", "__ior__",
    "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__",
})  # fmt: skip


def run_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function with cut arguments. Collective over the context group if it communicates."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return _attribute(func, args)
    if name in _OF_THE_WHOLE:
        with subclasses_unasked():
            return func(*args, **kwargs)
    if name in {"__repr__", "__format__", "__str__"}:
        cut = next(argument for argument in args if isinstance(argument, SeqShard))
        return f"SeqShard(shape={tuple(cut.shape)}, seq_dim={cut.seq_dim})"
    if name == "register_hook":
        return _hooked(*args, **kwargs)
    if name in {"requires_grad_", "retain_grad"}:
        func(args[0].local, *args[1:], **kwargs)
        return args[0]
    if name == "backward":
        raise UnsupportedError(
            "backward() was called on a tensor whose sequence is divided over ranks. Reduce it to "
            "a loss, such as by .sum() or .mean(), and call backward() on that."
        )
    rule = CUT_RULES.get(name)
    if rule is not None:
        result = rule(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return run_by_answer(func, args, kwargs)


run_functions_by(run_function)


def _attribute(func: Any, args: tuple[Any, ...]) -> Any:
    """Get or set an attribute of a tensor."""
    name, cut = func.__self__.__name__, args[0]
    if func.__name__ == "__set__":
        if name == "requires_grad":
            cut.local.requires_grad = args[1]
            return None
        raise UnsupportedError(
            f".{name} of a tensor whose sequence is divided over ranks was set. Make a new tensor "
            f"instead."
        )
    if name in _ATTRIBUTES_OF_THE_WHOLE:
        with subclasses_unasked():
            return func(cut)
    if name in _ATTRIBUTES_OF_THE_PART:
        return getattr(cut.local, name)
    if name == "grad":
        return None if cut.local.grad is None else cut.like(cut.local.grad)
    if name == "data":
        return cut.detach()
    if name == "T":
        return cut.permute(*reversed(range(cut.ndim)))
    if name == "mT":
        return cut.transpose(-2, -1)
    if name in {"real", "imag"}:
        return run_by_answer(getattr(torch, name), args, {})
    return getattr(make_whole(cut, f".{name}"), name)


def _hooked(cut: SeqShard, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a hook that gets gradients as ``SeqShard``, of the whole shape."""

    def call(gradient: Tensor) -> Tensor | None:
        result = hook(cut.like(gradient))
        return result.local if isinstance(result, SeqShard) else result

    return cut.local.register_hook(call)  # type: ignore[no-untyped-call]


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    return (
        name in _WRITES_FIRST
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("out") is not None
    )


def run_by_answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function by the result of the axis analysis. Collective if an operand is gathered.

    Raises:
        UnsupportedError: If it writes into a cut tensor and needs it whole.
    """
    name = getattr(func, "__name__", str(func))
    writes = _writes(name, kwargs)
    first = args[0] if args else None
    if writes and (kwargs.get("out") is not None or not isinstance(first, SeqShard)):
        # A write into a slice of a whole tensor would be lost.
        if isinstance(kwargs.get("out"), SeqShard):
            raise UnsupportedError(f"{name}(out=...) writes into a tensor whose sequence is "
                                   f"divided over ranks. Use what {name} returns.")  # fmt: skip
        args, kwargs = make_all_whole((args, kwargs), f"{name} into a whole tensor")
        return func(*args, **kwargs)
    call = Call(func, args, kwargs)
    while True:
        leaves = call.leaves
        cuts = [place for place, leaf in enumerate(leaves) if isinstance(leaf, SeqShard)]
        if not cuts:
            return call.run(leaves)
        answer = ask(call)
        if not answer.gathers:
            return _run_local(call, cuts, answer)
        worst = max(answer.gathers)
        if _brought_together(leaves, cuts):
            continue
        if writes and leaves[worst] is first:
            raise UnsupportedError(
                f"{name} writes in place into a tensor whose sequence is divided over ranks, and "
                f"{answer.gathers[worst]}. Use a function that returns a new tensor, such as "
                f"torch.where or torch.cat."
            )
        leaves[worst] = make_whole(leaves[worst], f"{name}, which {answer.gathers[worst]},")


def _brought_together(leaves: list[Any], cuts: list[int]) -> bool:
    """Divide one operand by positions, not channels, if another of its shape is; else False."""
    others = [leaves[cut] for cut in cuts if not leaves[cut].positions.are_channels]
    for place in cuts:
        value = leaves[place]
        if value.positions.are_channels and value.seq_dim == 1 and value.is_simple:
            for other in others:
                if other.shape == value.shape and other.seq_dim == 2 and other.is_simple:
                    leaves[place] = by_positions(value, other)
                    return True
    return False


def _run_local(call: Call, cuts: list[int], answer: Answer) -> Any:
    """Run a function on local tensors and wrap its results."""
    leaves = call.leaves
    state = leaves[cuts[0]].state
    lead = {operand: leaves[leader].positions for operand, leader in answer.leaders.items()}
    local = list(leaves)
    with subclasses_unasked():
        for place, several in answer.inputs.items():
            value = leaves[place]
            if isinstance(value, SeqShard):
                local[place] = moved_to(value, lead.get(place, value.positions)).local
                continue
            for sequence in several:
                if local[place].shape[sequence.dim] != 1:
                    local[place] = part_of(
                        local[place], sequence.dim, lead[sequence.operands[0]], state,
                        sequence.num_outer, sequence.num_inner,
                    )  # fmt: skip
        with state.draws.own(everywhere=True) if answer.draws else nullcontext():
            result = _run_on_parts(call, local)
        outputs = answer.cut_outputs
        if isinstance(result, Tensor):
            sequence_dim = outputs.get(0)
            return result if sequence_dim is None else _wrapped(result, sequence_dim, lead, state)
        flat, spec = tree_flatten(result)
        for place, sequence in outputs.items():
            flat[place] = _wrapped(flat[place], sequence, lead, state)
        return tree_unflatten(flat, spec)


def _run_on_parts(call: Call, local: list[Any]) -> Any:
    """Run a function on plain tensors, or on this rank's tokens of a divided vocabulary."""
    if VocabularyTensor not in map(type, local):
        return call.run(local)
    with subclasses_asked():
        return gathered(call.run(local))


def _wrapped(result: Tensor, sequence: Any, lead: dict[int, Positions], state: Any) -> SeqShard:
    positions = lead[sequence.operands[0]]
    return make_cut(result, sequence.dim, positions, state, sequence.num_outer, sequence.num_inner)
