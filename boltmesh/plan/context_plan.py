"""Plan of context parallelism before a rank is started: cut of the sequence, bytes sent.

The model is built from fake tensors. One batch of the data runs through it for each rank of a
context group, with a process group that only counts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig

from boltmesh.configs.advice import located
from boltmesh.errors import ConfigError, LayoutError
from boltmesh.plan.dry_model import stand_in_model
from boltmesh.plan.dry_step import STEP
from boltmesh.plan.text import align, size_text
from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.context.axis import ContextAxis, ContextBoundaries
from boltmesh.strategies.context.entries import (
    EntryHooks,
    SequenceEntry,
    find_entries,
    lengths_of,
)
from boltmesh.strategies.context.exchange import ContextGroup
from boltmesh.strategies.context.opaque_functions import flex_attention_watched, functions_watched
from boltmesh.strategies.context.options import ContextOptions, refuse_modules
from boltmesh.strategies.context.seq_shard import ContextState, step_ended
from boltmesh.strategies.context.tokenwise import (
    TokenwiseModule,
    TokenwiseModules,
    find_tokenwise,
)
from boltmesh.strategies.context.verify import results_whole
from boltmesh.strategies.dry_run.step import DryRun
from boltmesh.strategies.lightning_compat.loops import step_arguments
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.expected_traffic import CountingGroup, count_step


@dataclass(frozen=True)
class ContextSummary:
    """A sequence divided over ranks, before it runs."""

    model: str
    size: int
    entries: dict[str, int]
    """Modules whose input is cut, and its dim."""
    length: int
    """Positions of the longest sequence of the batch."""
    positions: tuple[int, ...]
    """Positions of it by rank."""
    sent: tuple[dict[str, int], ...]
    """Bytes that each rank sends for a batch, forward and backward, by purpose."""
    gathered: dict[str, int]
    """Bytes of tensors that every rank makes whole, by the function that needs it."""
    notes: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """Return the same as JSON has it."""
        return {"schema": 1, "context": asdict(self)}


def plan_context(
    config: DictConfig, num_ranks: int, given: Mapping[str, Any], *, source: str
) -> ContextSummary:
    """Divide the sequence of a config's model as its strategy will.

    Raises:
        ConfigError: When there is no sequence, or the model cannot be built.
    """
    names = ("size", "attention", "balance", "max_gather_bytes", "dims", "tile_tokens")
    options = ContextOptions(**{name: given[name] for name in names if name in given})
    size = options.size or num_ranks
    if num_ranks % size:
        raise LayoutError(
            f"{located(source, 'strategy.size')}={size} does not divide {num_ranks} ranks."
        )
    with stand_in_model(config, source, needs="a sequence is found") as made:
        module, batch = made.module, made.batch
        run = DryRun(module, STEP, (batch, *step_arguments(module, STEP)), torch.device("cpu"))
        entries = find_sequence(run, options, source=source).entries
        sent, lengths, gathered = [], set[int](), dict[str, int]()
        whole = _state(options, 0, size)
        whole.take_batch(batch)
        hooks = EntryHooks(module, entries, whole, on_length=lengths.add)
        analyse(module, run.forward, blocks=find_blocks(module))
        hooks.remove()
        for rank in range(size):
            with sequence_divided(module, FoundSequence(entries), options, rank, size) as state:
                state.take_batch(batch)
                sent.append(_counted(run, state, source))
            gathered.update(state.gathered)
    length = max(lengths)
    division = whole.divide(length)
    return ContextSummary(
        model=type(module).__name__,
        size=size,
        entries={each.module: each.dim for each in entries},
        length=length,
        positions=tuple(division.count(rank) for rank in range(size)),
        sent=tuple(sent),
        gathered=gathered,
        notes=tuple(made.notes),
    )


@dataclass(frozen=True)
class FoundSequence:
    """Where a step divides its sequence."""

    entries: tuple[SequenceEntry, ...] = ()
    tokenwise: Mapping[str, TokenwiseModule] = field(default_factory=dict)
    """Modules that run on plain tensors; their saved tensors differ only if something is tiled."""


def find_sequence(run: DryRun, options: ContextOptions, *, source: str) -> FoundSequence:
    """Return where the sequence of a step begins, and modules in which no position meets another.

    Raises:
        ConfigError: When there is no sequence, or a module cannot take a divided one.
    """
    module = run.module
    refuse_modules(module)
    blocks = find_blocks(module)
    with flex_attention_watched():
        analysis = analyse(module, run.forward, blocks=blocks)
    lengths = None if options.dims is None else lengths_of(run.args[0], options.dims)
    entries = find_entries(module, analysis, tuple(blocks), lengths)
    if not entries:
        raise ConfigError(
            f"{source}: {type(module).__name__}.{STEP} has no sequence that could be divided. "
            f"Plan another strategy, such as --strategy zero3."
        )
    return FoundSequence(entries, find_tokenwise(analysis, lengths))


@contextmanager
def sequence_divided(
    module: LightningModule, found: FoundSequence, options: ContextOptions, rank: int, size: int
) -> Iterator[ContextState]:
    """Context in which a step runs with the positions of one rank, whose group only counts."""
    state = _state(options, rank, size)
    hooks = EntryHooks(module, found.entries, state)
    plain = TokenwiseModules(module, found.tokenwise, state, tile=options.tile_tokens)
    try:
        watched = functions_watched(), flex_attention_watched()
        with hooks.on(), results_whole(module, STEP), step_ended(state), watched[0], watched[1]:
            yield state
    finally:
        plain.remove()
        hooks.remove()


@contextmanager
def stages_divided(
    module: LightningModule,
    entries: tuple[SequenceEntry, ...],
    options: ContextOptions,
    rank: int,
    size: int,
) -> Iterator[ContextBoundaries]:
    """Context for stages that run with the positions of one rank, whose group only counts."""
    axis, state = ContextAxis(options), _state(options, rank, size)
    hooks = EntryHooks(module, entries, state)
    axis.entries, axis.state, axis.hooks = entries, state, hooks
    try:
        with functions_watched(), flex_attention_watched():
            yield ContextBoundaries(axis)
    finally:
        state.end_step()
        hooks.remove()


def _state(options: ContextOptions, rank: int, size: int) -> ContextState:
    return options.new_state(ContextGroup(CountingGroup(rank, size), torch.device("cpu")))


def _counted(run: DryRun, state: ContextState, source: str) -> dict[str, int]:
    runs = [(lambda _: run.run(), 1)]
    counted = count_step(run.module, runs, state.group, nullcontext, torch.device("cpu"))
    if counted is None:
        raise ConfigError(
            f"{source}: {STEP} needs values of tensors, so its bytes cannot be counted before a "
            f"run. boltmesh fit proves the step and shows them."
        )
    return dict(state.group.sent)


def write_context(summary: ContextSummary) -> str:
    """Return the plan as text."""
    places = ", ".join(f"{module} (dim {dim})" for module, dim in summary.entries.items())
    lines = [
        f"{summary.model} with {summary.length:,} positions over {summary.size} ranks",
        f"cut at {places}",
        "",
    ]
    purposes = sorted({purpose for each in summary.sent for purpose in each})
    ranks = range(summary.size)
    columns = [
        ("rank", [str(rank) for rank in ranks]),
        ("positions", [f"{count:,}" for count in summary.positions]),
    ]
    columns += [
        (purpose, [size_text(each.get(purpose, 0)) for each in summary.sent])
        for purpose in purposes
    ]
    lines += [*align(columns), "", "bytes that a rank sends for one batch"]
    if summary.gathered:
        lines += ["", "made whole on every rank:"]
        for why, num_bytes in sorted(summary.gathered.items(), key=lambda each: -each[1]):
            lines.append(f"  {size_text(num_bytes)}  {why.rstrip(',')}")
    return "\n".join([*lines, *summary.notes])
