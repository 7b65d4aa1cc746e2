"""Modules that compute each position alone: they run on plain tensors of this rank's positions.

Projections, norms and MLPs are found by the analysis that finds the sequence. A function on a
divided tensor costs some microseconds more, so these modules get the plain tensor inside it.
With tiles, a module with child modules runs on some positions at a time, and again in the backward
pass, so that it keeps the activations of one tile.

Source of the tiles: ALST, Bekman et al. 2025, section 3.1, https://arxiv.org/abs/2506.13996
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout, Module
from torch.utils.checkpoint import checkpoint

from boltmesh.strategies.context.entries import find_sequences
from boltmesh.strategies.context.seq_shard import ContextState, SeqShard
from boltmesh.strategies.patch import Changes
from boltmesh.strategies.tensor.analysis.analyse import Analysis
from boltmesh.strategies.tensor.analysis.symbolic_dims import (
    Dim,
    SymbolicDim,
    leaves,
    representative,
)
from boltmesh.strategies.tensor.analysis.trace import OperatorRecord
from boltmesh.strategies.torch_compat.modules import has_hooks


@dataclass(frozen=True)
class TokenwiseModule:
    """A module that takes one tensor with the sequence and returns one."""

    dim: int
    """The dim of the sequence, in both tensors."""
    draws: bool
    """Whether random numbers are drawn for positions."""


def find_tokenwise(
    analysis: Analysis, lengths: Collection[int] | None = None
) -> dict[str, TokenwiseModule]:
    """Return the modules that compute each position alone, by name.

    Dropout is the only module returned that draws random numbers: others may draw for whole rows.

    Args:
        analysis: Analysis of the step.
        lengths: As for ``find_entries``.
    """
    trace = analysis.trace
    sequences = set(map(representative, find_sequences(analysis, lengths)[0]))
    if any(each.form == "product" for each in sequences):
        return {}  # a view divides it somewhere
    parts = {representative(each) for atom in sequences for each in _parts_of(atom)}
    operators: dict[str, list[OperatorRecord]] = {}
    for step in trace.steps:
        for name in set(step.modules):
            operators.setdefault(name, []).append(step)
    drawn: dict[str, list[bool]] = {}
    for draw in trace.draws:
        path = draw.module
        while path:
            drawn.setdefault(path, []).append(_has(draw.dims, sequences))
            path = path.rpartition(".")[0]
    tokenwise = {}
    for name, taken in trace.module_inputs.items():
        given = list(trace.module_outputs.get(name, {}).values())
        if len(taken) != 1 or len(given) != 1 or not all(drawn.get(name, [])):
            continue
        if name in drawn and not issubclass(analysis.classes[name], Dropout):
            continue
        (operand,) = taken.values()
        dim = _dim_of(operand.dims, sequences)
        if dim is None or dim != _dim_of(given[0].dims, sequences):
            continue
        known = {operand.key}
        if all(_is_local(step, sequences, parts, known) for step in operators.get(name, [])):
            tokenwise[name] = TokenwiseModule(dim, name in drawn)
    return tokenwise


def _parts_of(atom: SymbolicDim) -> list[SymbolicDim]:
    return [one for part in atom.parts for one in (part, *_parts_of(representative(part)))]


def _has(dims: Collection[Dim], atoms: Collection[SymbolicDim]) -> bool:
    return any(representative(each) in atoms for dim in dims for each in (*dim, *leaves(dim)))


def _dim_of(dims: Collection[Dim], sequences: Collection[SymbolicDim]) -> int | None:
    """Return the only dim that contains a sequence; None if several do, or it contains more."""
    divided = [dim for dim, row in enumerate(dims) if _has([row], sequences)]
    if len(divided) != 1 or sum(each.size > 1 for each in list(dims)[divided[0]]) != 1:
        return None
    return divided[0]


def _is_local(
    step: OperatorRecord,
    sequences: Collection[SymbolicDim],
    parts: Collection[SymbolicDim],
    known: set[int],
) -> bool:
    """Whether an operator computes each position alone, from inputs or results of the module."""
    if _has([step.needed], sequences) or _has([step.needed], parts):
        return False
    divided = [each for each in step.inputs if _has(each.dims, sequences)]
    if any(each.key not in known or each.parameter for each in divided):
        return False  # positions or masks of the whole, which the module makes or holds
    if any(_has(each.dims, parts) for each in (*step.inputs, *step.outputs)):
        return False
    for each in step.outputs:
        if divided and sum(_has([row], sequences) for row in each.dims) != 1:
            return False
        if not divided and _has(each.dims, sequences):
            return False
        known.add(each.key)
    return True


class TokenwiseModules:
    """Makes modules run on plain tensors if they are called with a divided one.

    Args:
        model: The model.
        modules: Modules that compute each position alone, by name.
        state: State of the run.
        is_training: Whether a training step was analysed: modules in the other mode run as
            all others do.
        tile: Number of positions in a tile; None: modules are not tiled.
    """

    def __init__(
        self,
        model: Module,
        modules: Mapping[str, TokenwiseModule],
        state: ContextState,
        *,
        is_training: bool = True,
        tile: int | None = None,
    ) -> None:
        self._changes = Changes()
        for name, each in modules.items():
            module = model.get_submodule(name)
            inner = [one for one in module.modules() if one is not module]
            if any(map(has_hooks, inner)):
                continue  # they see activations of the whole
            run = _PlainRun(state, module, each, is_training, tile if inner else None)
            self._changes.wrap(module, run)

    def remove(self) -> None:
        """Restore the model."""
        self._changes.undo()


@dataclass(frozen=True)
class _PlainRun:
    """Wraps the forward of a module."""

    state: ContextState
    module: Module
    kind: TokenwiseModule
    is_training: bool
    tile: int | None

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kind, value = self.kind, args[0] if len(args) == 1 and not kwargs else None
        if (
            not isinstance(value, SeqShard)
            or value.seq_dim != kind.dim
            or not value.is_simple
            or self.module.training != self.is_training
        ):
            return forward(*args, **kwargs)
        local = value.local
        with self.state.draws.own(everywhere=True) if kind.draws else nullcontext():
            if self.tile is None or local.shape[kind.dim] <= self.tile:
                result = forward(local)
            else:
                tiles = local.split(self.tile, kind.dim)  # type: ignore[no-untyped-call]
                made = [checkpoint(forward, each, use_reentrant=False) for each in tiles]
                result = torch.cat(made, kind.dim)
        assert isinstance(result, Tensor)
        return value.like(result)
