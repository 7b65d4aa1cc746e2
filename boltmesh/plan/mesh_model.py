"""Puts a config's model on a mesh without its memory, and counts what a rank would hold and move.

The model is built from fake tensors and divided as a run divides it: layers over the tensor axis,
what is left into stages, what a stage has over the data axis. Traffic is counted by what tells a
run what to expect, on ranks that were never started.

What the ranks of a pipeline would hold and move, each with its stages.

Of stand-ins for parameters, like ``mesh_rank.py``.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torchmetrics import Metric

from boltmesh.errors import ConfigError
from boltmesh.launch.log_filters import quiet_lightning
from boltmesh.plan.context_plan import entries_of
from boltmesh.plan.dry_model import (
    NumberTypes,
    build_fake,
    faked,
    first_batch,
    is_keeping,
    kept,
    own_optimizer,
)
from boltmesh.plan.dry_step import (
    STEP,
    DryStep,
    computing_in,
    copied,
    put_stand_ins,
    reshape_stand_in,
)
from boltmesh.plan.equal_blocks import continued, equal_blocks
from boltmesh.plan.mesh_rank import MeshJob, RankForecast, forecast_whole, over_layers
from boltmesh.plan.stage_model import (
    CutModel,
    PipelineModel,
    class_of,
    converted,
    cut_model,
    pipeline_model,
)
from boltmesh.plan.strategy_options import optimizer_copies
from boltmesh.plan.tensor_plan import TensorSummary, find_division, summarise
from boltmesh.schedule_sim import peak_live_bytes
from boltmesh.strategies.cost_model.memory import estimate_late_memory
from boltmesh.strategies.cost_model.model import ModelShape
from boltmesh.strategies.data_parallel.expected_traffic import (
    ExtraTraffic,
    PipelineZeroTraffic,
    describe_late_units,
)
from boltmesh.strategies.data_parallel.pipeline_ddp import BUCKET_BYTES, replica_traffic
from boltmesh.strategies.dry_run.no_side_effects import patched_log
from boltmesh.strategies.dry_run.step import DryRun
from boltmesh.strategies.lightning_compat.loops import step_arguments
from boltmesh.strategies.pipeline.expected_traffic import PipelineForecast, StageRehearsal
from boltmesh.strategies.pipeline.microbatch import MicrobatchSplitter
from boltmesh.strategies.pipeline.partition.placement import StageAssignment
from boltmesh.strategies.pipeline.schedules.actions import RankPrograms
from boltmesh.strategies.pipeline.stage.stage_run import StageRun
from boltmesh.strategies.pipeline.stage.units import find_stage_units
from boltmesh.strategies.pipeline.stage_params import TiedWeights
from boltmesh.strategies.pipeline.step_report import NUM_SIGNALS, length_of_row, size_of_told
from boltmesh.strategies.tensor.expected_traffic import CountingGroup
from boltmesh.strategies.tensor.runtime.apply import apply_plan
from boltmesh.strategies.torch_compat.modules import ParametersInPlace
from boltmesh.strategies.torch_compat.tensors import fake_tensors, tree_map
from boltmesh.telemetry.traffic import ExpectedTraffic

_CPU = torch.device("cpu")


def forecast_stages(module: LightningModule, job: MeshJob, cut: CutModel) -> list[RankForecast]:
    """Return the forecasts of the ranks of a pipeline.

    Args:
        module: Of each layer the part of one rank.
        job: What is asked.
        cut: How it is cut, and what runs on its parts.
    """
    with computing_in(job.types.cast):
        runs = [cut.plans.stages(STEP, part, *job.args[1:], seed=0) for part in job.parts]
    return [_forecast_rank(module, job, cut, runs, rank) for rank in range(cut.table.num_ranks)]


def _forecast_rank(
    module: LightningModule,
    job: MeshJob,
    cut: CutModel,
    runs: Sequence[Sequence[StageRun]],
    rank: int,
) -> RankForecast:
    """Return the forecast of one rank; ``runs`` are all stages, by microbatch."""
    known = _Stages(module, job, cut.division, rank)
    programs = RankPrograms(job.stages, cut.table.num_ranks, rank)
    own = cut.table.stages_of(rank)
    rehearsal = StageRehearsal(
        module,
        _CPU,
        [
            ((part, *job.args[1:]), [stages[each] for each in own])
            for part, stages in zip(job.parts, runs, strict=True)
        ],
    )
    over_tensors = over_layers(module, job, rehearsal.distinct())
    live = None
    if cut.division.kept_bytes is not None:
        live = peak_live_bytes(cut.table.order[rank], cut.division.kept_bytes)
    return RankForecast(
        parameters=sum(each.numel() for each in known.held),
        memory=estimate_late_memory(
            known.shape,
            job.sharing,
            job.data_job,
            activation_bytes=live or 0,
            bucket_bytes=2 * BUCKET_BYTES,
            num_versions=2 if programs.is_asynchronous else 1,
        ),
        activation_bytes=live,
        traffic=(
            *known.over_data(),
            *known.over_stages(programs, runs),
            *(over_tensors or ()),
        ),
        has_unknown_traffic=over_tensors is None,
        extra=known.extra(),
    )


class _Stages:
    """What one rank of a pipeline has of a model."""

    def __init__(
        self, module: LightningModule, job: MeshJob, division: StageAssignment, rank: int
    ) -> None:
        self._module, self._job, self._division, self._rank = module, job, division, rank

    @cached_property
    def _named(self) -> dict[str, Parameter]:
        holders = self._division.ranks_of_parameter
        named = self._module.named_parameters()
        return {name: each for name, each in named if self._rank in holders[name]}

    @property
    def held(self) -> Sequence[Parameter]:
        """Its parameters."""
        return list(self._named.values())

    @property
    def _trained(self) -> list[Parameter]:
        return [each for each in self.held if each.requires_grad]

    @property
    def _buffers(self) -> list[Tensor]:
        division = self._division
        return [
            each
            for name, each in self._module.named_buffers()
            if name in division.loose_buffers or division.rank_of_state(name) == self._rank
        ]

    @cached_property
    def shape(self) -> ModelShape:
        """What is gathered together, with all buffers of the module, which every rank has."""
        return self._shape(list(self._module.buffers()), has_scalars=True)

    def _shape(self, buffers: Sequence[Tensor], *, has_scalars: bool) -> ModelShape:
        shards = self._job.shards
        return describe_late_units(
            self._module,
            self.held,
            buffers,
            None if shards is None else shards.blocks,
            has_scalars=has_scalars,
        )

    def over_stages(
        self, programs: RankPrograms, runs: Sequence[Sequence[StageRun]]
    ) -> list[ExpectedTraffic]:
        """What the pipeline moves in an optimizer step.

        Args:
            programs: The actions of the rank.
            runs: All stages, by microbatch.
        """
        job = self._job
        group = CountingGroup(self._rank, job.layout.pipeline)
        forecast = PipelineForecast(programs, len(job.parts), group)
        forecast.crossing = [[each.plan.values_in for each in stages] for stages in runs]
        return forecast.traffic(
            accumulated=job.num_batches,
            num_norms=job.num_norms,
            shared=self._shared_by(group),
            told=size_of_told(job.num_logged, is_on_host=job.is_on_host),
            num_told=NUM_SIGNALS + length_of_row(job.num_logged, is_on_host=job.is_on_host),
            evened=self._evened() if job.layout.data > 2 else (0, 0),
            agrees_on_overflow=job.has_scaler,
        )

    def over_data(self) -> list[ExpectedTraffic]:
        """What the data axis moves in an optimizer step."""
        if self._job.layout.data == 1:
            return []
        if self._job.shards is None:
            return replica_traffic(self._trained, sum(each.nbytes for each in self._buffers))
        return self._late_traffic().expected()

    def extra(self) -> ExtraTraffic | None:
        """What ZeRO-2 or 3 moves more than ZeRO-1."""
        return None if self._job.shards is None else self._late_traffic().extra()

    def _late_traffic(self) -> PipelineZeroTraffic:
        job = self._job
        return PipelineZeroTraffic(
            self._shape(self._buffers, has_scalars=False),
            job.sharing,
            job.data_job,
            num_trained=len(self._trained),
            scalar_bytes=tuple(each.nbytes for each in self._trained if not each.dim()),
            num_norms=job.num_norms,
            has_scaler=job.has_scaler,
        )

    @property
    def _shared(self) -> dict[str, tuple[int, ...]]:
        holders = self._division.ranks_of_parameter
        return {name: ranks for name, ranks in holders.items() if len(ranks) > 1}

    def _shared_by(self, group: CountingGroup) -> tuple[int, int]:
        """Return bytes and calls of a batch for parameters that other stages hold as well."""
        own = [name for name, ranks in self._shared.items() if self._rank in ranks]
        return TiedWeights(
            ParametersInPlace(self._module, own),
            self._shared,
            group,
            lambda members: group if self._rank in members else None,
        ).size_per_batch()

    def _evened(self) -> tuple[int, int]:
        """Return bytes and calls of a step for their gradients, averaged over pipelines."""
        own = [name for name, ranks in self._shared.items() if self._rank in ranks]
        sizes = [
            self._part(each) * each.element_size()
            for name in own
            if (each := self._named[name]).requires_grad
        ]
        return sum(sizes), len(sizes)

    def _part(self, parameter: Parameter) -> int:
        """Return the elements that a gradient has once it is averaged."""
        if self._job.shards is None or not parameter.dim():
            return parameter.numel()
        rows = -(-parameter.shape[0] // self._job.shard_size)
        return rows * (parameter.numel() // parameter.shape[0])


@dataclass(frozen=True)
class MeshModel:
    """A model on a mesh before anything runs."""

    name: str
    numel: int
    """Elements of all parameters."""
    pipeline: PipelineModel | None
    """None without a pipeline."""
    tensor: TensorSummary | None
    """None where no ranks share layers."""
    ranks: tuple[RankForecast, ...]
    """By place on the pipeline; those beside each other have as much, or less."""
    state_copies: int
    notes: tuple[str, ...]


def describe_mesh(
    config: DictConfig, job: MeshJob, *, source: str, is_brief: bool = False
) -> MeshModel:
    """Divide a config's model as its strategy will.

    Args:
        config: The whole.
        job: What is asked.
        source: The config's file, for errors.
        is_brief: The figures of the ranks are wanted alone. If a model has many equal blocks (see
            ``equal_blocks``), each stage gets one and then two in place of its own, and the figures
            are continued as a line; blocks that fill no round go to the first stages.

    Raises:
        ConfigError: When the model cannot be built or divided, or its data give no batch.
    """
    if not is_brief:
        return _divide(config, job, source, None)[0]
    least = 2 if job.layout.pipeline == 1 else 1  # one block alone would be no repeated one
    fewer, times = _divide(config, job, source, least)
    if times is None:
        return fewer
    more, _ = _divide(config, job, source, least + 1)
    return _extended(fewer, more, times)


def _extended(fewer: MeshModel, more: MeshModel, times: int) -> MeshModel:
    """Return the model with so many more blocks for each stage than the first has."""
    pipeline = None
    if fewer.pipeline is not None and more.pipeline is not None:
        stages = zip(fewer.pipeline.stages, more.pipeline.stages, strict=True)
        pipeline = replace(
            more.pipeline,
            stages=tuple(
                continued(replace(one, units=two.units), two, times) for one, two in stages
            ),
            ranks=continued(fewer.pipeline.ranks, more.pipeline.ranks, times),
        )
    ranks = []
    for one, two in zip(fewer.ranks, more.ranks, strict=True):
        like = replace(one.memory, peak_moment=two.memory.peak_moment)
        made = continued(replace(one, memory=like), two, times)
        ranks.append(replace(made, memory=made.memory.at_fullest_moment()))
    return replace(
        more,
        numel=continued(fewer.numel, more.numel, times),
        pipeline=pipeline,
        tensor=None,
        ranks=tuple(ranks),
    )


def _divide(
    config: DictConfig, job: MeshJob, source: str, per_stage: int | None
) -> tuple[MeshModel, int | None]:
    """Divide a model, with all of its blocks or with so many for each stage.

    Returns:
        The model, and how many blocks more each stage has; None where it has all.
    """
    quiet_lightning()
    batch, complaint = first_batch(config, source)
    if complaint is not None:
        raise ConfigError(f"{source}: a mesh is planned by running a batch, and {complaint}.")
    types = job.types
    parts, rows = [batch], [0]
    if job.layout.pipeline > 1:
        parts, rows = MicrobatchSplitter().cut(
            batch, job.stages.num_microbatches(job.layout.pipeline)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a module without a Trainer
        key = "model", OmegaConf.to_yaml(config.model, resolve=True), types
        made = kept(key, lambda: _build(config, types, parts[0], source))
        module, optimizer, notes = made.module, made.optimizer, [*made.notes]
        times = None
        with ExitStack() as fewer:
            if per_stage is not None:
                context, job, times = _with_fewer_blocks(module, job, per_stage)
                fewer.enter_context(context)
            if is_keeping() or times is not None:
                module = copied(module)
        numel = sum(each.numel() for each in module.parameters())
        copies, assumed = optimizer_copies(config, *class_of(optimizer))
        notes += assumed
        job = replace(
            job,
            state_copies=copies,
            num_logged=made.num_logged,
            args=(converted(batch, types.stored), *step_arguments(module, STEP)),
            parts=tuple(converted(each, types.stored) for each in parts),
        )
        if job.sequences is not None:
            step = DryRun(module, STEP, job.args, _CPU)
            job = replace(job, entries=entries_of(step, job.sequences, source=source))
        tensor = _divide_layers(module, job, source)
        pipeline = None
        if job.layout.pipeline == 1:
            ranks, told = forecast_whole(module, job)
        else:
            pipeline, ranks, told = _cut_into_stages(config, module, job, rows, optimizer)
        notes += told
    return MeshModel(
        name=type(module).__name__,
        numel=numel,
        pipeline=pipeline,
        tensor=tensor,
        ranks=tuple(ranks),
        state_copies=copies,
        notes=tuple(notes),
    ), times


@dataclass(frozen=True)
class _BuiltModel:
    """A config's model of stand-ins, its optimizer and the number of values that it logs."""

    module: LightningModule
    optimizer: Optimizer | None
    notes: list[str]
    num_logged: int


def _build(config: DictConfig, types: NumberTypes, part: Any, source: str) -> _BuiltModel:
    with fake_tensors() as mode:
        module, notes = build_fake(config, types, source)
        optimizer = own_optimizer(module)
        num_logged = _count_logged(module, tree_map(faked(mode, types.stored), part), types.cast)
    put_stand_ins(module)
    return _BuiltModel(module, optimizer, notes, num_logged)


def _with_fewer_blocks(
    module: LightningModule, job: MeshJob, per_stage: int
) -> tuple[AbstractContextManager[None], MeshJob, int | None]:
    """Leave a module so many blocks for each stage, with the same borders between stages.

    Returns:
        Within what it has so few; the job of these; how many more each stage has, None where
        no blocks can be left out.
    """
    found = equal_blocks(module)
    size = job.layout.pipeline
    stages = 1 if size == 1 else job.stages.num_stages(size)
    if found is None or job.stages.split != "auto":
        return nullcontext(), job, None
    whole, rest = divmod(found.count, stages)
    if whole <= per_stage + 1:
        return nullcontext(), job, None
    borders, first = [], 0
    for stage in range(stages - 1):
        first += per_stage + (stage < rest)
        borders.append(f"{found.name}.{first}")
    if borders:
        job = replace(job, stages=replace(job.stages, split=borders))
    return found.first(per_stage * stages + rest), job, whole - per_stage


def _divide_layers(module: LightningModule, job: MeshJob, source: str) -> TensorSummary | None:
    """Leave the first rank's part of each layer, and let layers run on it."""
    size = job.layout.tensor
    if size == 1:
        return None
    plan = find_division(module, job.args[0], size, job.layers, source=source)
    summary = summarise(module, plan, job.types.stored.itemsize, ())
    for each in plan.sharded.values():
        reshape_stand_in(module.get_parameter(each.name), each.local_shape(size))
    applied = apply_plan(module, plan, job.group)
    if job.layout.pipeline > 1:
        applied.cut_into_stages(find_stage_units(module))
    return summary


def _cut_into_stages(
    config: DictConfig,
    module: LightningModule,
    job: MeshJob,
    rows: Sequence[int],
    optimizer: Optimizer | None,
) -> tuple[PipelineModel, list[RankForecast], list[str]]:
    """Return the stages of what is left of a model, their ranks, and what was not found out."""
    args = (job.parts[0], *job.args[1:])
    num_ranks, num_parts, cast = job.layout.pipeline, len(job.parts), job.types.cast
    cut = cut_model(config, module, job.stages, num_ranks, num_parts, args, cast=cast)
    kept_bytes = cut.division.kept_bytes
    pipeline = pipeline_model(
        module, cut, rows, kept_bytes=kept_bytes, optimizer=optimizer, notes=()
    )
    notes = []
    if kept_bytes is None:
        notes.append("activations are not known, and no part of a peak")
    if job.stages.split == "measured":
        notes.append("split=measured: a run times the layers; here they are counted")
    return pipeline, forecast_stages(module, job, cut), notes


def _count_logged(module: LightningModule, part: Any, cast: torch.dtype | None) -> int:
    """Return how many numbers a step logs, which the last stage of a pipeline tells the others."""
    names: set[tuple[str, str | None]] = set()

    def note(name: str, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, Mapping):
            names.update((name, str(key)) for key in value)
        elif not isinstance(value, Metric):
            names.add((name, None))

    with patched_log(module, note):
        DryStep().run(module, part, cast)
    return len(names)
