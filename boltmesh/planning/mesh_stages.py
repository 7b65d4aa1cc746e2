"""What the ranks of a pipeline would hold and move, each with its stages.

Of stand-ins for parameters, like ``mesh_rank.py``.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Parameter

from boltmesh.planning.dry_step import STEP, computing_in
from boltmesh.planning.mesh_rank import MeshJob, RankForecast, over_layers
from boltmesh.planning.stage_model import CutModel
from boltmesh.strategies.data.late_replicas import BUCKET_BYTES, replica_traffic
from boltmesh.strategies.data.late_traffic import ExtraTraffic, LateTraffic
from boltmesh.strategies.data.late_units import describe_late_units
from boltmesh.strategies.pipeline.bubble import peak_live_bytes
from boltmesh.strategies.pipeline.forecast import Forecast
from boltmesh.strategies.pipeline.placement import Division
from boltmesh.strategies.pipeline.programs import Programs
from boltmesh.strategies.pipeline.rehearsal import StageRehearsal
from boltmesh.strategies.pipeline.replay.stage_run import StageRun
from boltmesh.strategies.pipeline.sharing import SharedParameters
from boltmesh.strategies.pipeline.signals import NUM_SIGNALS
from boltmesh.strategies.pipeline.told_rows import length_of_row, size_of_told
from boltmesh.strategies.planner.late import estimate_late_memory
from boltmesh.strategies.planner.model import ModelShape
from boltmesh.strategies.tensor.traffic import CountingGroup
from boltmesh.strategies.torch_compat import ParametersInPlace
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
    programs = Programs(job.stages, cut.table.num_ranks, rank)
    own = cut.table.stages_of(rank)
    rehearsal = StageRehearsal(
        module,
        _CPU,
        [
            ((part, *job.args[1:]), [stages[each] for each in own])
            for part, stages in zip(job.parts, runs, strict=True)
        ],
    )
    over_tensors = over_layers(module, job, rehearsal)
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
        self, module: LightningModule, job: MeshJob, division: Division, rank: int
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
        self, programs: Programs, runs: Sequence[Sequence[StageRun]]
    ) -> list[ExpectedTraffic]:
        """What the pipeline moves in an optimizer step.

        Args:
            programs: The actions of the rank.
            runs: All stages, by microbatch.
        """
        job = self._job
        group = CountingGroup(self._rank, job.layout.pipeline)
        forecast = Forecast(programs, len(job.parts), group)
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

    def _late_traffic(self) -> LateTraffic:
        job = self._job
        return LateTraffic(
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
        return SharedParameters(
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
