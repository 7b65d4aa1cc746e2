"""What one rank of a mesh would hold and move, by its place on the pipeline.

Of stand-ins for parameters: the model is divided already, and nothing of it is computed.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule

from boltmesh.plan.context_plan import sequence_divided
from boltmesh.plan.dry_model import NumberTypes, faked, shapes_of_units
from boltmesh.plan.dry_step import STEP, DryStep, computing_in
from boltmesh.strategies.context.cut import ContextState
from boltmesh.strategies.context.entries import SequenceEntry
from boltmesh.strategies.context.exchange import expected_context_traffic
from boltmesh.strategies.context.options import ContextOptions
from boltmesh.strategies.cost_model.memory import MemoryEstimate, estimate_memory
from boltmesh.strategies.cost_model.model import (
    Activations,
    JobShape,
    ModelShape,
    ShardingLayout,
    Widths,
)
from boltmesh.strategies.cost_model.traffic import estimate_traffic
from boltmesh.strategies.data_parallel.expected_traffic import ExtraTraffic, expected_shard_traffic
from boltmesh.strategies.data_parallel.options import ZeroOptions
from boltmesh.strategies.dry_run.step import DryRun
from boltmesh.strategies.engine.axis import FakeRuns
from boltmesh.strategies.lightning_compat.trainer import (
    module_keeps_gradients,
    module_reads_gradients,
)
from boltmesh.strategies.mesh import MeshLayout
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.tensor.expected_traffic import (
    GroupWithoutRanks,
    count_step,
    expected_traffic,
)
from boltmesh.strategies.torch_compat.modules import swapped_state
from boltmesh.strategies.torch_compat.tensors import fake_tensors, make_fake, tree_map
from boltmesh.telemetry.traffic import ExpectedTraffic

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MeshJob:
    """What is asked of a mesh, and what a model and its data say beside it."""

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
    """What a step is called with."""
    entries: tuple[SequenceEntry, ...] = ()
    """Where a step divides its sequence."""
    parts: tuple[Any, ...] = field(default=(), repr=False)
    """The microbatches of the batch among them."""

    @property
    def num_averaged(self) -> int:
        """Ranks over which a gradient is averaged."""
        return self.layout.data * self.layout.size("context")

    @property
    def sharing(self) -> ShardingLayout:
        """How the data axis shares out what its ranks have."""
        return ShardingLayout("replicas", 0) if self.shards is None else self.shards.sharing()

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
    def num_norms(self) -> int:
        """Norms of gradients in an optimizer step."""
        return int(self.has_norm_clipping)


@dataclass(frozen=True)
class RankForecast:
    """What one rank would hold and move."""

    parameters: int
    """Elements that its stages and its part of their layers have, before the data axis."""
    memory: MemoryEstimate
    activation_bytes: int | None
    """Kept for backward passes at most; None where nobody knows."""
    traffic: tuple[ExpectedTraffic, ...]
    """Of an optimizer step."""
    has_unknown_traffic: bool
    """Whether it is not known what a tensor or context axis moves."""
    extra: ExtraTraffic | None = None
    """Of ZeRO-2 and 3 beside a pipeline."""


def forecast_whole(module: LightningModule, job: MeshJob) -> tuple[list[RankForecast], list[str]]:
    """Return the forecasts of ranks that run all layers, and what was not found out.

    One for each rank of a context group.
    """
    options, size = job.sequences, job.layout.size("context")
    found: list[RankForecast] = []
    notes: dict[str, None] = {}
    for rank in range(size):
        divided = (
            nullcontext()
            if options is None
            else sequence_divided(module, job.entries, options, rank, size)
        )
        with divided as state:
            forecast, said = _forecast_rank(module, job, state)
        found.append(forecast)
        notes.update(dict.fromkeys(said))
    return found, list(notes)


def _forecast_rank(
    module: LightningModule, job: MeshJob, state: ContextState | None
) -> tuple[RankForecast, list[str]]:
    measured = DryStep()
    mode = fake_tensors()
    swapped: dict[str, torch.Tensor] = {}
    for name, each in [*module.named_parameters(), *module.named_buffers()]:
        swapped[name] = make_fake(each, mode)
    with mode, swapped_state(module, swapped):
        if state is not None:
            state.take_batch(job.args[0])
        batch = tree_map(faked(mode, job.types.stored), job.args[0])
        complaint = measured.run(module, batch, job.types.cast)
    notes = [] if complaint is None else [f"activations are not known: {complaint}"]
    units = shapes_of_units(
        module, job.shards, multiplied=measured.counts.cast_names, is_autocast=job.types.is_autocast
    )
    activations = None
    if complaint is None:
        activations = Activations(
            measured.counts.saved_bytes, measured.counts.transient_bytes, "counted"
        )
    shape = ModelShape(
        type(module).__name__,
        units,
        buffer_bytes=sum(each.nbytes for each in module.buffers()),
        activations=activations,
        reads_gradients=module_reads_gradients(module),
        keeps_gradients=module_keeps_gradients(module),
    )
    rehearsal = DryRun(module, STEP, job.args, _CPU)
    runs: FakeRuns = [(lambda _: rehearsal.run(), 1)]
    over_axes = [over_layers(module, job, runs)]
    if state is not None:
        over_axes.append(_over_sequence(module, job, runs, state))
    counted = [each for several in over_axes for each in several or ()]
    return RankForecast(
        parameters=sum(each.numel() for each in module.parameters()),
        memory=estimate_memory(shape, job.sharing, job.data_job),
        activation_bytes=None if activations is None else activations.saved_bytes,
        traffic=(*_over_data(shape, job), *counted),
        has_unknown_traffic=None in over_axes,
    ), notes


def _over_sequence(
    module: LightningModule, job: MeshJob, runs: FakeRuns, state: ContextState
) -> list[ExpectedTraffic] | None:
    """Return the traffic of the context axis in an optimizer step; None where it is unknown."""
    counted = count_step(module, runs, state.group, lambda: computing_in(job.types.cast), _CPU)
    if counted is None:
        return None
    size = job.layout.size("context")
    return expected_context_traffic(counted, size=size, accumulated=job.num_batches)


def _over_data(shape: ModelShape, job: MeshJob) -> list[ExpectedTraffic]:
    """What the data axis moves beside forward and backward passes of whole models."""
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
    """Return what the tensor axis moves in an optimizer step; None where nobody knows.

    Args:
        module: Of each layer the part of one rank.
        job: What is asked.
        runs: What the rank runs of a batch.
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
