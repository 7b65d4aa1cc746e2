"""Predicts memory and traffic of the ranks of a pipeline, each with its stages.

Parameters are stand-ins, as for ``mesh_rank.py``.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Parameter

from boltmesh.plan.context_plan import stages_divided
from boltmesh.plan.dry_step import STEP, computing_in
from boltmesh.plan.mesh_rank import (
    MeshJob,
    RankForecast,
    count_pass,
    divided_at,
    held_numel,
    over_copies,
    over_experts,
    over_layers,
    over_sequence,
)
from boltmesh.plan.stage_model import CutModel
from boltmesh.schedule_sim import peak_live_bytes
from boltmesh.strategies.context.seq_shard import ContextState
from boltmesh.strategies.cost_model.memory import estimate_late_memory
from boltmesh.strategies.cost_model.model import ModelShape
from boltmesh.strategies.data_parallel.expected_traffic import (
    ExtraTraffic,
    PipelineZeroTraffic,
    describe_late_units,
)
from boltmesh.strategies.data_parallel.pipeline_ddp import BUCKET_BYTES, replica_traffic
from boltmesh.strategies.pipeline.expected_traffic import StageRehearsal, pipeline_traffic
from boltmesh.strategies.pipeline.partition.placement import StageAssignment
from boltmesh.strategies.pipeline.schedules.actions import RankPrograms
from boltmesh.strategies.pipeline.stage.plan_cache import StagePlans
from boltmesh.strategies.pipeline.stage.stage_run import StageRun
from boltmesh.strategies.pipeline.stage.unit_outputs import describe_unit
from boltmesh.strategies.pipeline.stage.units import find_stage_units
from boltmesh.strategies.pipeline.stage_params import TiedWeights
from boltmesh.strategies.pipeline.step_report import NUM_SIGNALS, broadcast_size, length_of_row
from boltmesh.strategies.tensor.expected_traffic import CountingGroup
from boltmesh.strategies.torch_compat.modules import ParametersInPlace
from boltmesh.telemetry.traffic import ExpectedTraffic

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StageWork:
    """Work of the ranks at one place of a pipeline, however the data axis shares their parameters.

    Attributes:
        module: The part of one rank of each layer.
        division: How it is cut.
        rank: Place on the pipeline.
        runs: All stages, by microbatch.
        programs: The actions of the rank.
        activation_bytes: Kept for backward passes at most; None where it is not known.
        moved: Over the tensor, context and expert axes, in an optimizer step.
        has_unknown_traffic: Whether a part of that is not known.
        shapes: Its units, by what was asked of them: they are the same for many layouts.
    """

    module: LightningModule
    division: StageAssignment
    rank: int
    runs: Sequence[Sequence[StageRun]]
    programs: RankPrograms
    activation_bytes: int | None
    moved: tuple[ExpectedTraffic, ...]
    has_unknown_traffic: bool
    shapes: dict[object, ModelShape] = field(default_factory=dict, repr=False, compare=False)

    def forecast(self, job: MeshJob) -> RankForecast:
        """Return memory and traffic of a rank."""
        known = _Stages(self, job)
        return RankForecast(
            parameters=held_numel(known.named.items(), job),
            memory=estimate_late_memory(
                known.shape,
                job.sharing,
                job.data_job,
                activation_bytes=self.activation_bytes or 0,
                bucket_bytes=2 * BUCKET_BYTES,
                num_versions=2 if self.programs.is_asynchronous else 1,
                experts=job.owned,
            ),
            activation_bytes=self.activation_bytes,
            traffic=(*known.over_data(), *known.over_stages(), *self.moved),
            has_unknown_traffic=self.has_unknown_traffic,
            extra=known.extra(),
        )


def kept_by_units(module: LightningModule, job: MeshJob) -> list[Mapping[str, int] | None]:
    """Return the bytes that units keep of a microbatch, for each rank of a context group.

    For what the look by which a model is cut does not see: it has whole sequences, and no results
    that blocks keep beside their inputs. Called before blocks are set to run again.
    """
    if job.sequences is None and not job.is_selective:
        return []
    found: list[Mapping[str, int] | None] = []
    for rank in range(job.layout.size("context")):
        with divided_at(module, job, rank) as state:
            units = find_stage_units(module)
            counts, _ = count_pass(module, job, state, job.parts[0], units, is_transient=False)
        found.append(None if counts is None else counts.saved_by)
    return found


def work_of_stages(
    module: LightningModule,
    job: MeshJob,
    cut: CutModel,
    kept_by: Sequence[Mapping[str, int] | None],
    *,
    has_equal_blocks: bool,
) -> list[StageWork]:
    """Return the work of the ranks of a pipeline, one for each rank of a context group.

    Args:
        module: The part of one rank of each layer.
        job: The requested mesh.
        cut: How it is cut, and what runs on its parts.
        kept_by: Result of ``kept_by_units``.
        has_equal_blocks: Blocks of one kind differ in their number alone: what ranks with the same
            kinds move is counted once.
    """
    found: list[list[StageWork]] = []
    kinds: dict[str, Hashable] = {}
    if has_equal_blocks:
        units = cut.plans.units.items()
        kinds = {name: describe_unit(each, vars(each).get("forward"))[0] for name, each in units}
    for rank in range(job.layout.size("context")):
        kept = cut.division.kept_bytes
        if kept_by:
            kept = _kept_by_stage(kept_by[rank], cut.division)
        with _stages_at(module, job, cut, rank) as (plans, state):
            with computing_in(job.types.cast):
                runs = [plans.stages(STEP, part, *job.args[1:], seed=0) for part in job.parts]
            places = []
            moved: dict[Hashable, _OverAxes] = {}
            for at in range(cut.table.num_ranks):
                own = cut.table.stages_of(at)
                key = _kind_of_rank(runs, own, kinds) if has_equal_blocks else at
                if key not in moved:
                    parts = [
                        ((part, *job.args[1:]), [stages[each] for each in own])
                        for part, stages in zip(job.parts, runs, strict=True)
                    ]
                    rehearsal = StageRehearsal(module, _CPU, parts)
                    moved[key] = _over_axes(module, job, rehearsal, state)
                places.append(_stage_work(module, job, cut, runs, at, kept, moved[key]))
            found.append(places)
    return [each for places in zip(*found, strict=True) for each in places]


def _kept_by_stage(
    kept: Mapping[str, int] | None, division: StageAssignment
) -> tuple[int, ...] | None:
    if kept is None:
        return None
    return tuple(sum(kept.get(unit.name, 0) for unit in members) for members in division.stages)


@contextmanager
def _stages_at(
    module: LightningModule, job: MeshJob, cut: CutModel, rank: int
) -> Iterator[tuple[StagePlans, ContextState | None]]:
    """Context in which stages run with the positions of one rank of a context group."""
    if job.sequences is None:
        yield cut.plans, None
        return
    size = job.layout.size("context")
    with stages_divided(module, job.sequence.entries, job.sequences, rank, size) as boundaries:
        division = cut.division.stage_of_unit
        yield StagePlans(module, cut.plans.units, division, boundaries=boundaries), boundaries.state


_OverAxes = Sequence[Sequence[ExpectedTraffic] | None]
"""Traffic over the tensor and the context axis; None where it is not known."""


def _kind_of_rank(
    runs: Sequence[Sequence[StageRun]], own: Sequence[int], kinds: Mapping[str, Hashable]
) -> Hashable:
    """Return what ranks have in common that run equal units between equal values.

    Args:
        runs: All stages, by microbatch.
        own: Stages of the rank.
        kinds: Kinds of units, by name.
    """
    found: list[Hashable] = []
    for stages in runs:
        for stage in own:
            plan = stages[stage].plan
            if not plan.is_in_order:
                return tuple(own)
            end = len(plan.trace.events) if plan.is_last else stages[stage + 1].plan.begin
            events = plan.trace.events[plan.begin : end]
            values = [(each.shape, each.dtype, each.needs_grad) for each in plan.values_in]
            found.append((*values, *(kinds.get(each.name, each.name) for each in events)))
    return tuple(found)


def _over_axes(
    module: LightningModule, job: MeshJob, rehearsal: StageRehearsal, state: ContextState | None
) -> _OverAxes:
    found = [over_layers(module, job, rehearsal.distinct())]
    if state is not None:
        found.append(over_sequence(module, job, rehearsal.distinct(), state))
    return found


def _stage_work(
    module: LightningModule,
    job: MeshJob,
    cut: CutModel,
    runs: Sequence[Sequence[StageRun]],
    rank: int,
    kept: Sequence[int] | None,
    over_axes: _OverAxes,
) -> StageWork:
    holders = cut.division.ranks_of_parameter
    held = {
        name: each
        for name, each in job.exchanges.items()
        if any(rank in holders.get(parameter, ()) for parameter in each.parameters)
    }
    counted = [each for several in over_axes for each in several or ()]
    return StageWork(
        module,
        cut.division,
        rank,
        runs,
        RankPrograms(job.stages, cut.table.num_ranks, rank),
        None if kept is None else peak_live_bytes(cut.table.order[rank], kept),
        (*counted, *over_experts(job, held)),
        has_unknown_traffic=None in over_axes,
    )


class _Stages:
    """The part of a model on one rank of a pipeline."""

    def __init__(self, work: StageWork, job: MeshJob) -> None:
        self._work, self._job = work, job
        self._module, self._division = work.module, work.division
        self._rank = work.rank

    @cached_property
    def named(self) -> dict[str, Parameter]:
        """Its parameters."""
        holders = self._division.ranks_of_parameter
        named = self._module.named_parameters()
        return {name: each for name, each in named if self._rank in holders[name]}

    @property
    def _held(self) -> Sequence[Parameter]:
        return list(self.named.values())

    @property
    def _trained(self) -> list[Parameter]:
        return [each for each in self._held if each.requires_grad]

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
        """Units that are gathered, with all buffers of the module, which every rank has."""
        return self._shape(list(self._module.buffers()), has_scalars=True)

    def _shape(self, buffers: Sequence[Tensor], *, has_scalars: bool) -> ModelShape:
        shards, shapes = self._job.shards, self._work.shapes
        blocks = None if shards is None else shards.blocks
        key = repr(blocks), has_scalars
        if key not in shapes:
            shapes[key] = describe_late_units(
                self._module, self._held, buffers, blocks, has_scalars=has_scalars
            )
        return shapes[key]

    def over_stages(self) -> list[ExpectedTraffic]:
        """Return the traffic of the pipeline in an optimizer step."""
        job, runs, programs = self._job, self._work.runs, self._work.programs
        group = CountingGroup(self._rank, job.layout.pipeline)
        return pipeline_traffic(
            programs,
            group.size(),
            [[each.plan.values_in for each in stages] for stages in runs],
            accumulated=job.num_batches,
            num_norms=job.num_norms,
            shared=self._shared_by(group),
            last_stage_values=broadcast_size(job.num_logged, is_on_host=job.is_on_host),
            report_length=NUM_SIGNALS + length_of_row(job.num_logged, is_on_host=job.is_on_host),
            evened=self._evened() if job.layout.data > 2 else (0, 0),
            agrees_on_overflow=job.has_scaler,
        )

    def over_data(self) -> list[ExpectedTraffic]:
        """Return the traffic of the data axis in an optimizer step."""
        if self._job.num_averaged * self._job.layout.tensor == 1:
            return []
        of_experts = []
        if self._job.owned is not None:
            of_experts = over_copies(self._job.owned.split(self.shape)[1], self._job)
        if self._job.num_averaged == 1:
            return of_experts
        if self._job.shards is None:
            buffer_bytes = sum(each.numel() * each.element_size() for each in self._buffers)
            return replica_traffic(self._trained, buffer_bytes)
        return [*self._late_traffic().expected(), *of_experts]

    def extra(self) -> ExtraTraffic | None:
        """Return the bytes by which ZeRO-2 or 3 moves more than ZeRO-1."""
        return None if self._job.shards is None else self._late_traffic().extra()

    def _late_traffic(self) -> PipelineZeroTraffic:
        job = self._job
        shape = self._shape(self._buffers, has_scalars=False)
        return PipelineZeroTraffic(
            shape if job.owned is None else job.owned.split(shape)[0],
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
            if (each := self.named[name]).requires_grad
        ]
        return sum(sizes), len(sizes)

    def _part(self, parameter: Parameter) -> int:
        """Return the elements that a gradient has once it is averaged."""
        if self._job.shards is None or not parameter.dim():
            return parameter.numel()
        rows = -(-parameter.shape[0] // self._job.shard_size)
        return rows * (parameter.numel() // parameter.shape[0])
