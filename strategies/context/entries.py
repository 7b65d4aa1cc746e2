"""Finds the modules that first take the sequence, by running a step on tensors without data.

A sequence is a dim of the data along which some function other than a loss computes, preferably
attention or a softmax. It is cut where the data first meet a parameter, in an ``Embedding`` or
``Linear``. If the first layer cannot be cut, such as a convolution that makes patches of images,
the first of the repeated blocks cuts its input.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import Module

from boltmesh.errors import ConfigError
from boltmesh.strategies.context.seq_shard import ContextState, SeqShard, cut
from boltmesh.strategies.patch import patched
from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.symbolic_dims import (
    Dim,
    Reason,
    SymbolicDim,
    leaves,
    representative,
)
from boltmesh.strategies.torch_compat.autograd import is_in_backward
from boltmesh.strategies.torch_compat.tensors import functions_unwatched

_LOSSES = ("nll_loss", "mse_loss", "smooth_l1", "huber", "binary_cross")
_READS = ("__array__", "numpy", "tolist")
_ENTRIES = (nn.Embedding, nn.Linear)


@dataclass(frozen=True)
class SequenceEntry:
    """A module that first takes the sequence, and whose input is cut."""

    module: str
    """Its dotted name."""
    argument: int | str
    """Position or keyword of the argument that is cut."""
    dim: int
    """The dim of that argument with the sequence."""


def find_entries(
    model: Module,
    analysis: Analysis,
    blocks: Sequence[str],
    lengths: Collection[int] | None = None,
) -> tuple[SequenceEntry, ...]:
    """Return the modules that first take the sequence; empty if no dim of the data is one.

    Args:
        model: The model that was analysed.
        analysis: Analysis of the step.
        blocks: Names of the repeated blocks.
        lengths: Sizes of the dims that the user has named; None: found from the functions.
    """
    trace = analysis.trace
    axes, modules = find_sequences(analysis, lengths)
    entries: dict[str, SequenceEntry] = {}
    for name in modules:
        if not isinstance(model.get_submodule(name), _ENTRIES):
            continue
        for each in trace.module_outputs.get(name, {}).values():
            for dim, row in enumerate(each.dims):
                if len(_tops(row)) == 1 and _tops(row)[0] in axes:
                    entries.setdefault(name, SequenceEntry(name, 0, dim))
    if entries:
        return tuple(entries.values())
    return tuple(_of_blocks(analysis, blocks, axes))


def _of_blocks(
    analysis: Analysis, blocks: Sequence[str], axes: Sequence[SymbolicDim]
) -> Iterator[SequenceEntry]:
    """Yield the first block of each list of blocks that takes a sequence."""
    seen = set()
    for block in blocks:
        parent = block.rpartition(".")[0]
        taken = analysis.trace.module_inputs.get(block, {})
        if parent in seen or not taken:
            continue
        seen.add(parent)
        argument, operand = next(iter(taken.items()))
        dims = [dim for dim, row in enumerate(operand.dims) if any(a in axes for a in _tops(row))]
        if len(dims) == 1:
            yield SequenceEntry(block, argument, dims[0])
        elif len(operand.dims) == 3:  # (batch, length, channels)
            yield SequenceEntry(block, argument, 1)


def find_sequences(
    analysis: Analysis, lengths: Collection[int] | None = None
) -> tuple[list[SymbolicDim], list[str]]:
    """Return the sequences, and the modules whose parameters the data first meet.

    Args:
        analysis: Analysis of the step.
        lengths: As for ``find_entries``.
    """
    made: set[int] = set()
    found: list[SymbolicDim] = []
    modules: list[str] = []
    for step in analysis.trace.steps:
        data = [each for each in step.inputs if each.parameter is None]
        has_parameter = len(data) < len(step.inputs)
        if has_parameter and data and not any(each.key in made for each in data):
            own = {
                representative(atom)
                for each in step.inputs
                if each.parameter
                for dim in each.dims
                for atom in leaves(dim)
            }
            for dim in step.outputs[0].dims:
                atoms = {*_tops(dim), *map(representative, leaves(dim))} - own
                found += [
                    each
                    for each in atoms
                    if (
                        any(not _is_loss(reason) for reason in _reasons(each))
                        if lengths is None
                        else each.size in lengths
                    )
                ]
            modules.append(step.module)
        made |= {each.key for each in step.outputs}
    if lengths is not None:
        return found, modules
    looked = [each for each in found if any(_is_attention(reason) for reason in _reasons(each))]
    return looked or found, modules


def _is_loss(reason: Reason) -> bool:
    return reason.operator.startswith((*_LOSSES, *_READS, "the result of the step"))


def _is_attention(reason: Reason) -> bool:
    return "attention" in reason.operator or "softmax" in reason.operator


def _tops(dim: Dim) -> list[SymbolicDim]:
    """Return the dims of the data in a dim, from before any view divided them."""
    return [representative(each) for each in dim if each.size > 1]


def _reasons(atom: SymbolicDim) -> list[Reason]:
    top = representative(atom)
    return [*top.reasons, *(reason for each in top.parts for reason in _reasons(each))]


def lengths_of(batch: Any, dims: Mapping[str | int, int]) -> set[int]:
    """Return the lengths of the dims that the user has named.

    Raises:
        ConfigError: If the batch does not have them.
    """
    found = set()
    for name, dim in dims.items():
        fields = batch if isinstance(batch, Mapping) else {}
        if isinstance(batch, list | tuple):
            fields = dict(enumerate(batch))
        value = fields.get(name)
        if not isinstance(value, Tensor) or not -value.ndim <= dim < value.ndim:
            shown = {key: tuple(each.shape) for key, each in fields.items()
                     if isinstance(each, Tensor)}  # fmt: skip
            raise ConfigError(
                f"dims={dict(dims)!r} names dim {dim} of {name!r}, and the batch has "
                f"{shown or 'no tensors by name or place'}. Name a tensor and a dim that are there."
            )
        found.add(value.shape[dim])
    return found


class EntryHooks:
    """Hooks that cut the inputs of a model's entries while they are switched on.

    Args:
        model: The model.
        entries: The modules that first take its sequence.
        state: State of the run.
        on_length: Called with the length of each sequence that an entry takes; then nothing is cut.
    """

    def __init__(
        self,
        model: Module,
        entries: Sequence[SequenceEntry],
        state: ContextState,
        *,
        on_length: Callable[[int], None] | None = None,
    ) -> None:
        self.is_on = False
        self._state = state
        self._on_length = on_length
        self._handles = [
            model.get_submodule(each.module).register_forward_pre_hook(
                self._hook(each), with_kwargs=True
            )
            for each in entries
        ]

    def _hook(self, entry: SequenceEntry) -> Any:
        def call(
            module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if self._on_length is None and not (self.is_on or is_in_backward()):
                return None
            given, named = list(args), dict(kwargs)
            place = entry.argument
            if isinstance(place, int) and place >= len(given):
                place = next(iter(named), 0)
            value = given[place] if isinstance(place, int) else named.get(place)
            if not isinstance(value, Tensor) or isinstance(value, SeqShard):
                return None
            if value.ndim <= entry.dim:
                return None
            if self._on_length is not None:
                self._on_length(value.shape[entry.dim])
                return None
            with functions_unwatched():  # a pipeline counts the functions between its units
                taken = cut(value, entry.dim, self._state)
            if isinstance(place, int):
                given[place] = taken
            else:
                named[place] = taken
            return tuple(given), named

        return call

    def on(self) -> AbstractContextManager[None]:
        """Context in which entries cut; they also do in backward passes, for recomputed blocks."""
        return patched(self, is_on=True)

    def off(self) -> AbstractContextManager[None]:
        """Context in which entries do not cut."""
        return patched(self, is_on=False)

    def remove(self) -> None:
        """Remove the hooks."""
        for each in self._handles:
            each.remove()
        self._handles.clear()
