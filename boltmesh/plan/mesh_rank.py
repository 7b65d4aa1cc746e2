"""Predicts memory and traffic of a rank of a mesh, by its place on the pipeline and context axes.

Parameters are stand-ins: the model is divided already, and nothing of it is computed. The work of a
place (``RankWork``, ``StageWork``) is counted once; memory and traffic of its ranks follow for each
way in which the data axis shares parameters.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.nn import Module, Parameter

from boltmesh.plan.context_plan import FoundSequence, sequence_divided
from boltmesh.plan.dry_model import NumberTypes, count_on_fakes, shape_of_model
from boltmesh.plan.dry_step import STEP, DryStep, StepCounts, computing_in
from boltmesh.plan.equal_blocks import equal_blocks
from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing
from boltmesh.strategies.context.exchange import expected_context_traffic
from boltmesh.strategies.context.options import ContextOptions
from boltmesh.strategies.context.seq_shard import ContextState
from boltmesh.strategies.cost_model.memory import MemoryEstimate, estimate_memory
from boltmesh.strategies.cost_model.model import (
    REPLICA,
    Bytes,
    JobShape,
    ModelShape,
    OwnedExperts,
    ShardingLayout,
    Widths,
)
from boltmesh.strategies.cost_model.traffic import estimate_traffic
from boltmesh.strategies.data_parallel.expected_traffic import ExtraTraffic, expected_shard_traffic
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.dry_run.step import DryRun
from boltmesh.strategies.engine.axis import FakeRuns
from boltmesh.strategies.expert.expected_traffic import ExchangeShape, exchange_traffic
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.offload.activations import IN_FLIGHT, MIN_BYTES
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.tensor.expected_traffic import (
    GroupWithoutRanks,
    count_step,
    expected_traffic,
)
from boltmesh.strategies.tiling.logits import LogitTiling
from boltmesh.telemetry.traffic import ExpectedTraffic

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ExpertExchange:
    """The experts of one module, and the rows that go to them."""

    parameters: tuple[str, ...]
    shape: ExchangeShape


@dataclass(frozen=True)
class MeshJob:
    """The requested mesh, with facts of the model and its data."""

    layout: MeshLayout
    shard_size: int
    """Ranks of the data axis that share one copy."""
    shards: ZeroOptions | None
    """None: replicas."""
    stages: PipelineOptions
    layers: Mapping[str, Any]
    """``plan``, ``sequence_parallel`` and ``loss_parallel``."""
    sequences: ContextOptions | None
    """None: sequences are whole."""
    expert: int
    """Ranks that divide the experts of a stage."""
    recompute: Any
    """``activation_checkpointing`` of the strategy."""
    offload: bool | str
    """``activation_offload`` of the strategy."""
    tile_logits: int | None
    """``tile_logits`` of the strategy."""
    widths: Widths
    types: NumberTypes
    num_batches: int
    """In an optimizer step."""
    has_norm_clipping: bool
    has_scaler: bool
    reads_gradients: bool
    is_on_host: bool
    group: GroupWithoutRanks
    """The first rank of a tensor group."""
    state_copies: int = 2
    num_logged: int = 0
    """Numbers that a step logs."""
    args: tuple[Any, ...] = ()
    """Arguments of a step."""
    sequence: FoundSequence = field(default_factory=FoundSequence)
    """Where a step divides its sequence."""
    exchanges: Mapping[str, ExpertExchange] = field(default_factory=dict)
    """Experts that ranks divide, by the name of their module."""
    parts: tuple[Any, ...] = field(default=(), repr=False)
    """The microbatches of the batch among them."""

    @property
    def num_averaged(self) -> int:
        """Ranks over which a gradient is averaged."""
        return self.layout.data * self.layout.size("context")

    @property
    def sharing(self) -> ShardingLayout:
        """Sharding over the data axis."""
        return REPLICA if self.shards is None else self.shards.sharing()

    @property
    def data_job(self) -> JobShape:
        """The data axis as the planner sees it."""
        return JobShape(
            num_ranks=self.num_averaged,
            widths=self.widths,
            shard_size=self.shard_size,
            num_microbatches=self.num_batches,
            state_copies=self.state_copies,
            reads_gradients=self.reads_gradients,
            is_on_host=self.is_on_host,
        )

    @property
    def owned(self) -> OwnedExperts | None:
        """The experts that ranks have parts of; None where every rank has all."""
        if not self.exchanges:
            return None
        names = frozenset(name for each in self.exchanges.values() for name in each.parameters)
        copies = self.num_averaged * self.layout.tensor // self.expert
        return OwnedExperts(names, self.expert, copies)

    @property
    def is_selective(self) -> bool:
        """Whether blocks that run again keep results of products."""
        return self.recompute == "selective" or "selective" in (self.recompute or ())

    @property
    def num_norms(self) -> int:
        """Norms of gradients in an optimizer step."""
        return int(self.has_norm_clipping)


@dataclass(frozen=True)
class RankForecast:
    """Memory and traffic of one rank."""

    parameters: int
    """Elements that its stages and its part of their layers have, before the data axis."""
    memory: MemoryEstimate
    activation_bytes: int | None
    """Kept for backward passes at most; None where it is not known."""
    traffic: tuple[ExpectedTraffic, ...]
    """In an optimizer step."""
    has_unknown_traffic: bool
    """Whether the traffic of a tensor or context axis is unknown."""
    extra: ExtraTraffic | None = None
    """Additional traffic of ZeRO-2 and 3 beside a pipeline."""


@dataclass(frozen=True)
class RankWork:
    """Work of the ranks at one place of a mesh, however the data axis shares their parameters."""

    module: LightningModule
    """The part of one rank of each layer."""
    counts: StepCounts | None
    """Counts of a batch; None where it cannot be run."""
    moved: tuple[ExpectedTraffic, ...]
    """Over other axes than the data axis, in an optimizer step."""
    has_unknown_traffic: bool

    def forecast(self, job: MeshJob) -> RankForecast:
        """Return memory and traffic of a rank."""
        shape = shape_of_model(self.module, job.shards, job.types, self.counts)
        rest, of_experts = shape, []
        if job.owned is not None:
            rest, owned = job.owned.split(shape)
            of_experts = over_copies(owned, job)
        return RankForecast(
            parameters=held_numel(self.module.named_parameters(), job),
            memory=estimate_memory(shape, job.sharing, job.data_job, job.owned),
            activation_bytes=None if self.counts is None else self.counts.saved_bytes,
            traffic=(*_over_data(rest, job), *of_experts, *self.moved),
            has_unknown_traffic=self.has_unknown_traffic,
        )


def work_of_whole(module: LightningModule, job: MeshJob) -> tuple[list[RankWork], list[str]]:
    """Return the work of ranks that run all layers, and notes on unknown values.

    One for each rank of a context group.
    """
    found: list[RankWork] = []
    notes: dict[str, None] = {}
    for rank in range(job.layout.size("context")):
        tiling = LogitTiling(job.tile_logits)
        tiling.put_on(module)
        with divided_at(module, job, rank) as state:
            work, complaint = _work(module, job, state)
        tiling.take_off()
        found.append(work)
        if complaint is not None:
            notes[f"activations are not known: {complaint}"] = None
    return found, list(notes)


@contextmanager
def divided_at(module: LightningModule, job: MeshJob, rank: int) -> Iterator[ContextState | None]:
    """Context in which a step runs with the positions of one rank of a context group."""
    if job.sequences is None:
        yield None
        return
    size = job.layout.size("context")
    with sequence_divided(module, job.sequence, job.sequences, rank, size) as state:
        yield state


def _work(
    module: LightningModule, job: MeshJob, state: ContextState | None
) -> tuple[RankWork, str | None]:
    of_experts = {name: module.get_submodule(name) for name in job.exchanges}
    counts, complaint = count_pass(module, job, state, job.args[0], of_experts)
    if counts is not None and of_experts:  # ranks of a tensor group have a part of the rows each
        rows = sum(counts.saved_by.get(name, 0) for name in of_experts)
        saved = counts.saved_bytes - rows + rows // job.layout.tensor
        counts = replace(counts, saved_bytes=saved)
    rehearsal = DryRun(module, STEP, job.args, _CPU)
    runs: FakeRuns = [(lambda _: rehearsal.run(), 1)]
    over_axes = [over_layers(module, job, runs)]
    if state is not None:
        over_axes.append(over_sequence(module, job, runs, state))
    counted = [each for several in over_axes for each in several or ()]
    moved = (*counted, *over_experts(job, job.exchanges))
    return RankWork(module, counts, moved, has_unknown_traffic=None in over_axes), complaint


def count_pass(
    module: LightningModule,
    job: MeshJob,
    state: ContextState | None,
    batch: Any,
    units: Mapping[str, Module],
    *,
    is_transient: bool = True,
) -> tuple[StepCounts | None, str | None]:
    """Count a step on a batch or a microbatch, or say why it cannot be run.

    Args:
        module: The part of one rank of each layer.
        job: The requested mesh.
        state: State of a sequence that is divided.
        batch: Argument of the step.
        units: To which what is kept is attributed, beside blocks that run again.
        is_transient: Whether to count temporary tensors of a block that runs again.
    """
    equal = equal_blocks(module)
    counts = None
    if job.recompute is None or is_transient:
        counts, complaint = _count(module, job, state, batch, DryStep(equal=equal), units)
        if job.recompute is None or counts is None:
            return counts, complaint
    recomputation = ActivationCheckpointing(job.recompute)
    recomputation.put_on(module)
    blocks = {name: each for name, each in module.named_modules() if each in recomputation.blocks}
    measured = DryStep(selective=blocks if job.is_selective else (), equal=equal)
    outside = {
        name: unit
        for name, unit in units.items()
        if not any(f"{name}.".startswith(f"{block}.") for block in blocks)
    }
    again, complaint = _count(module, job, state, batch, measured, {**outside, **blocks})
    recomputation.take_off()
    if again is not None and job.offload and not job.is_selective:
        again = _without_inputs(again, blocks, job)
    if again is None or counts is None:
        return again, complaint
    one_block = (counts.saved_bytes - again.saved_bytes) // len(blocks)
    return replace(again, transient_bytes=again.transient_bytes + one_block), None


def _without_inputs(counts: StepCounts, blocks: Iterable[str], job: MeshJob) -> StepCounts:
    """Return counts of a step whose inputs of recomputed blocks wait off the device.

    The newest stay there. What is no tensor of a block's own inputs, as a mask, counts as one.
    """
    if job.is_on_host and job.offload is True:
        return counts  # host memory is where they are
    inputs = [counts.saved_by.get(name, 0) for name in blocks]
    inputs = [each for each in inputs if each >= MIN_BYTES]
    left = sum(inputs) - sum(sorted(inputs)[-IN_FLIGHT:])
    waiting = Bytes(host=left) if job.offload is True else Bytes(disk=left)
    return replace(counts, saved_bytes=counts.saved_bytes - left, elsewhere=waiting)


def _count(
    module: LightningModule,
    job: MeshJob,
    state: ContextState | None,
    batch: Any,
    measured: DryStep,
    attributed: Mapping[str, Module],
) -> tuple[StepCounts | None, str | None]:
    if state is not None:
        # Before the batch becomes fake: documents are counted on real data.
        state.take_batch(batch)
    with measured.attributing(attributed):
        complaint = count_on_fakes(measured, module, batch, job.types)
    return (measured.counts, None) if complaint is None else (None, complaint)


def held_numel(named: Iterable[tuple[str, Parameter]], job: MeshJob) -> int:
    """Return the elements that a rank holds of parameters: of experts, its own part."""
    owned = job.owned
    return sum(
        each.numel() // owned.size if owned and name in owned.names else each.numel()
        for name, each in named
    )


def over_experts(job: MeshJob, held: Mapping[str, ExpertExchange]) -> list[ExpectedTraffic]:
    """Return the bytes that exchanges of rows move in an optimizer step.

    Args:
        job: The requested mesh.
        held: The experts that a rank has parts of.
    """
    if not held:
        return []
    layout, parts = job.layout, max(1, len(job.parts))
    again = job.recompute is not None
    shapes = [(each.shape.part(layout.size("context") * parts), again) for each in held.values()]
    return exchange_traffic(
        shapes,
        job.expert,
        job.num_batches * parts,
        sharing=layout.tensor,
        gathers_parts=layout.tensor > 1,
        why="rows to the ranks of their experts and back, if all experts were as likely",
    )


def over_copies(owned: ModelShape, job: MeshJob) -> list[ExpectedTraffic]:
    """Return the bytes of gradients of a rank's experts between the ranks with the same ones."""
    if job.owned is None or job.owned.num_copies == 1:
        return []
    copies = replace(job.data_job, num_ranks=job.owned.num_copies, shard_size=None)
    why = "gradients of a rank's experts, over the ranks that have the same ones"
    return [
        ExpectedTraffic("data", "allreduce", each.whole_bytes, each.calls, why)
        for each in estimate_traffic(owned, REPLICA, copies)
    ]


def over_sequence(
    module: LightningModule, job: MeshJob, runs: FakeRuns, state: ContextState
) -> list[ExpectedTraffic] | None:
    """Return the traffic of the context axis in an optimizer step; None where it is unknown."""
    counted = count_step(module, runs, state.group, lambda: computing_in(job.types.cast), _CPU)
    if counted is None:
        return None
    size = job.layout.size("context")
    return expected_context_traffic(counted, size=size, accumulated=job.num_batches)


def _over_data(shape: ModelShape, job: MeshJob) -> list[ExpectedTraffic]:
    """Return the traffic of the data axis of whole models in an optimizer step."""
    sharing, data_job = job.sharing, job.data_job
    if data_job.num_ranks == 1:
        return []
    if sharing.stage > 0:
        return expected_shard_traffic(shape, sharing, data_job, num_norms=job.num_norms)
    why = "gradients of all trainable parameters, once"
    found = [
        ExpectedTraffic("data", "allreduce", each.whole_bytes, each.calls, why)
        for each in estimate_traffic(shape, sharing, data_job)
    ]
    if shape.buffer_bytes:
        why = "buffers of the first data rank, before a synchronised forward pass"
        found.append(ExpectedTraffic("data", "broadcast", shape.buffer_bytes, None, why))
    return found


def over_layers(
    module: LightningModule, job: MeshJob, runs: FakeRuns
) -> list[ExpectedTraffic] | None:
    """Return the traffic of the tensor axis in an optimizer step; None where it is not known.

    Args:
        module: The part of one rank of each layer.
        job: The requested mesh.
        runs: Runs of the rank for one batch, on fake tensors.
    """
    if job.layout.tensor == 1:
        return []
    counted = count_step(module, runs, job.group, lambda: computing_in(job.types.cast), _CPU)
    if counted is None:
        return None
    return expected_traffic(
        counted,
        size=job.layout.tensor,
        accumulated=job.num_batches,
        num_norms=job.num_norms,
        agrees_on_overflow=job.has_scaler,
    )
