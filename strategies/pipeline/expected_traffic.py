"""Forecast of training batches on a pipeline: their order, traffic and memory.

``expected_traffic`` counts the traffic of an optimizer step over the boundaries of a rank's
stages. ``StageRehearsal`` runs the stages of this rank once with a batch on fake tensors, without
communication; received values have the planned shapes. ``pipeline_traffic`` adds what ranks agree
on and share in a step; ``PipelineEstimate`` computes order, traffic and memory of a batch from a
sample, for the engine and telemetry.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Parameter

from boltmesh.schedule_sim import RECEIVES, SENDS, peak_live_bytes
from boltmesh.strategies.cost_model.traffic import NORM_BYTES, OVERFLOW_BYTES
from boltmesh.strategies.dry_run.no_side_effects import untraced
from boltmesh.strategies.pipeline.microbatch_runs import Around
from boltmesh.strategies.pipeline.partition.placement import StagePlacement
from boltmesh.strategies.pipeline.runtime.backward import StageGraph, backward
from boltmesh.strategies.pipeline.runtime.handshake import handshake_size
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.schedules.actions import RankProgram, RankPrograms
from boltmesh.strategies.pipeline.stage.plan_cache import TRAINING, batch_signature
from boltmesh.strategies.pipeline.stage.stage_run import StageRun
from boltmesh.strategies.pipeline.step_report import NUM_SIGNALS
from boltmesh.strategies.torch_compat.tensors import FakeTensorMode
from boltmesh.telemetry.snapshot import MemoryKind, MemoryPlace, PipelinePlan
from boltmesh.telemetry.traffic import CONTROL, ExpectedTraffic

if TYPE_CHECKING:
    from boltmesh.strategies.pipeline.staged_model import StagedModel

Crossing = Sequence[Sequence[tuple[ValueSpec, ...]]]
"""Values sent over the boundary before a stage, by microbatch and stage of a training batch."""


def expected_traffic(
    program: RankProgram, crossing: Crossing, *, accumulated: int = 1
) -> list[ExpectedTraffic]:
    """Return the payload bytes and messages of one optimizer step on one rank, by operator.

    Args:
        program: Actions of the rank for a batch.
        crossing: Values sent over boundaries.
        accumulated: Batches in an optimizer step.
    """
    expected: list[ExpectedTraffic] = []
    for operator, kinds in (("send", SENDS), ("recv", RECEIVES)):
        num_bytes = num_messages = 0
        for action in program.actions:
            if action.kind not in kinds:
                continue
            specs = crossing[action.microbatch][action.boundary]
            if action.kind.endswith("B"):
                specs = tuple(spec for spec in specs if spec.needs_grad)
            num_bytes += sum(spec.num_bytes for spec in specs)
            num_messages += sum(spec.num_bytes > 0 for spec in specs)
        size = num_bytes * accumulated, num_messages * accumulated
        why = "each microbatch: values over a boundary, gradients back"
        expected += _in_sum("pipeline", operator, {why: size})
    return expected


def _in_sum(
    axis: str, operator: str, sizes: Mapping[str, tuple[int, int]]
) -> list[ExpectedTraffic]:
    """Return one operator's traffic from bytes and calls by purpose; empty without any."""
    named = {why: each for why, each in sizes.items() if each[1]}
    if not named:
        return []
    num_bytes, calls = map(sum, zip(*named.values(), strict=True))
    return [
        ExpectedTraffic(
            axis=axis,
            operator=operator,
            payload_bytes=float(num_bytes),
            calls=float(calls),
            why=", ".join(named),
        )
    ]


def with_second_version(
    expected: Iterable[MemoryKind], held: Iterable[Parameter]
) -> list[MemoryKind]:
    """Return the memory of a rank with stashed weights and a second set of gradients.

    Args:
        expected: Memory with one version of each.
        held: The rank's parameters; those that are not trained have one version.
    """
    trained = sum(each.numel() * each.element_size() for each in held if each.requires_grad)
    return [
        msgspec.structs.replace(kind, predicted_bytes=kind.predicted_bytes + trained)
        if kind.kind in {"parameters", "gradients"} and kind.predicted_bytes is not None
        else kind
        for kind in expected
    ]


def boundary_bytes(crossing: Crossing, accumulated: int) -> tuple[tuple[int, int], ...]:
    """Return the bytes of an optimizer step over each boundary: values forward, gradients back.

    Args:
        crossing: Values sent over boundaries.
        accumulated: Batches in an optimizer step.
    """
    num_stages = len(crossing[0]) if crossing else 0
    sizes = []
    for stage in range(1, num_stages):
        specs = [spec for stages in crossing for spec in stages[stage]]
        forward = sum(spec.num_bytes for spec in specs)
        back = sum(spec.num_bytes for spec in specs if spec.needs_grad)
        sizes.append((forward * accumulated, back * accumulated))
    return tuple(sizes)


@dataclass(frozen=True)
class StageRehearsal:
    """Forward and backward passes of all microbatches of a training batch on fake tensors.

    Args:
        module: The module, whose parameters are fake tensors during a call.
        device: Device of the fake tensors.
        runs: Arguments of the step and stages of this rank, by microbatch.
    """

    module: LightningModule
    device: torch.device
    runs: Sequence[tuple[tuple[Any, ...], Sequence[StageRun]]]

    def distinct(self) -> list[tuple["StageRehearsal", int]]:
        """Return one run for all microbatches that run the same way, with their count."""
        by_kind: dict[Hashable, list[tuple[tuple[Any, ...], Sequence[StageRun]]]] = {}
        for run in self.runs:
            args, stages = run
            key = batch_signature(args), tuple(map(id, stages))
            by_kind.setdefault(key, []).append(run)
        return [(replace(self, runs=each[:1]), len(each)) for each in by_kind.values()]

    def __call__(self, mode: FakeTensorMode) -> None:
        """Run all microbatches. Modules, gradients and random states do not change.

        Args:
            mode: Mode of the fake parameters.
        """
        with untraced(self.module, self.device), torch.enable_grad():
            self.module.train()
            for args, stages in self.runs:
                for stage in stages:
                    self._run(stage, args, mode)

    def _run(self, stage: StageRun, args: tuple[Any, ...], mode: FakeTensorMode) -> None:
        received = tuple(self._made_up(each, mode) for each in stage.plan.values_in)
        result = stage.forward(received, args)
        if isinstance(result, Mapping):
            result = result.get("loss")
        given = result if isinstance(result, tuple) else (result,)
        outputs = [each for each in given if isinstance(each, Tensor)]
        backward(
            StageGraph.of(received, outputs), tuple(torch.zeros_like(each) for each in outputs)
        )

    def _made_up(self, spec: ValueSpec, mode: FakeTensorMode) -> Tensor:
        with mode:
            value = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        return value.requires_grad_() if spec.needs_grad else value


def pipeline_traffic(
    programs: RankPrograms,
    num_ranks: int,
    crossing: Crossing,
    *,
    accumulated: int,
    num_norms: int,
    shared: tuple[int, int],
    last_stage_values: tuple[int, int],
    report_length: int,
    evened: tuple[int, int],
    agrees_on_overflow: bool,
) -> list[ExpectedTraffic]:
    """Return the expected traffic of one optimizer step on one rank.

    Args:
        programs: The actions of the rank.
        num_ranks: Ranks of the pipeline.
        crossing: Values sent over boundaries.
        accumulated: Batches in the step.
        num_norms: Norms over all stages in the step.
        shared: Bytes and calls per batch, for gradients of parameters that several stages hold.
        last_stage_values: Bytes and calls per batch, for the loss and logged values.
        report_length: Length of a rank's report at the end of a batch, in numbers.
        evened: Bytes and calls per step, for shared parameters' averages over pipelines.
        agrees_on_overflow: Whether stages exchange gradient overflow before the step.
    """
    expected = expected_traffic(programs.of(len(crossing)), crossing, accumulated=accumulated)
    if num_ranks == 1:
        return expected

    def in_step(of_batch: tuple[int, int]) -> tuple[int, int]:
        return of_batch[0] * accumulated, of_batch[1] * accumulated

    agreements = {
        "agreements of the ranks at both ends of a batch, and its loss": in_step(
            handshake_size(programs.num_stages, num_ranks, report_length)
        )
    }
    reduced = {
        "gradients of parameters that stages share": in_step(shared),
        "the norm for clipping": (NORM_BYTES * num_norms, num_norms),
        "whether fp16 has overflown": (
            OVERFLOW_BYTES * agrees_on_overflow,
            int(agrees_on_overflow),
        ),
    }
    broadcast = {
        "loss and logged values of the last stage": in_step(last_stage_values),
        "averaged gradients of parameters that stages share": evened,
    }
    return [
        *expected,
        *_in_sum("pipeline", "allreduce", reduced),
        *_in_sum("pipeline", "broadcast", broadcast),
        *_in_sum(CONTROL, "send", agreements),
        *_in_sum(CONTROL, "recv", agreements),
    ]


class PipelineEstimate:
    """Expected order, traffic and memory of this rank for a placed model.

    Args:
        model: The model, which stays placed over several runs.
        placement: Its division into stages and its step plans.
        num_microbatches: Microbatches of the sample batch.
    """

    def __init__(
        self, model: "StagedModel", placement: StagePlacement, *, num_microbatches: int
    ) -> None:
        self._model = model
        self._placement = placement
        self._num_microbatches = num_microbatches
        self._crossing: Crossing | None = None
        """None before the first training batch."""

    def plan(self, accumulated: int) -> PipelinePlan:
        """Return the plan for the run's records.

        Args:
            accumulated: Batches in an optimizer step.
        """
        programs = self._model.programs
        return PipelinePlan(
            schedule=programs.schedule,
            num_stages=programs.num_stages,
            num_microbatches=self._num_microbatches,
            order=programs.order(self._num_microbatches),
            rank_of_stage=programs.rank_of_stage,
            border_bytes=boundary_bytes(self._crossing or (), accumulated),
        )

    def look_at(self, batch: Any, rest: tuple[Any, ...], around: Around) -> None:
        """Compute the traffic of one training batch unless it is known.

        Args:
            batch: A training batch before its transfer.
            rest: The arguments of ``training_step`` that follow the batch.
            around: The precision context.
        """
        if self._crossing is None:
            with around():
                self._model.share_outputs(self._model.parts_of(batch)[0], rest, {})
            _, runs = self._runs(batch, rest, around)
            self._crossing = [[each.plan.values_in for each in stages] for stages in runs]

    def rehearsed(self, batch: Any, rest: tuple[Any, ...], around: Around) -> StageRehearsal:
        """Return a run of this rank's stages without the other ranks.

        Args:
            batch: A training batch on the device.
            rest: The arguments of ``training_step`` that follow the batch.
            around: The precision context.
        """
        parts, runs = self._runs(batch, rest, around)
        own = self._model.programs.of(len(parts)).stages
        return StageRehearsal(
            self._model.module,
            self._model.context.device,
            [
                ((part, *rest), [stages[each] for each in own])
                for part, stages in zip(parts, runs, strict=True)
            ],
        )

    def _runs(
        self, batch: Any, rest: tuple[Any, ...], around: Around
    ) -> tuple[list[Any], list[tuple[StageRun, ...]]]:
        """Return a batch's microbatches, and the stages of each."""
        parts, _ = self._model.parts_of(batch)
        plans, seed = self._placement.plans, self._model.context.seed
        with around():
            return parts, [plans.stages(TRAINING, part, *rest, seed=seed) for part in parts]

    def traffic(self, accumulated: int, *, num_norms: int) -> list[ExpectedTraffic]:
        """Return the expected traffic of one optimizer step on this rank; empty if unknown.

        Args:
            accumulated: Batches in the step.
            num_norms: Norms over all stages in the step.
        """
        if self._crossing is None:
            return []
        model, shared, context = self._model, self._model.holdings.shared, self._model.context
        return pipeline_traffic(
            model.programs,
            context.group.size(),
            self._crossing,
            accumulated=accumulated,
            num_norms=num_norms,
            shared=shared.size_per_batch(),
            last_stage_values=model.sharing.size_per_batch(),
            report_length=NUM_SIGNALS + model.sharing.length,
            evened=shared.size_of_gradients() if context.shared_averages_may_differ else (0, 0),
            agrees_on_overflow=context.scaler is not None,
        )

    def activations(self) -> list[MemoryKind]:
        """Return the peak memory of activations on this rank; empty if unknown."""
        kept, model = self._placement.division.kept_bytes, self._model
        if kept is None:
            return []
        place: MemoryPlace = "host" if model.context.device.type == "cpu" else "device"
        order = model.programs.order(self._num_microbatches)[model.context.group.rank()]
        return [MemoryKind("activations", place, None, peak_live_bytes(order, kept))]
