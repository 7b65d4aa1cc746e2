"""Runs steps over the stages of all ranks: with backward passes, forward only, or layer by layer.

``training.py`` handles the results of a training batch, ``evaluation.py`` those of the other loops;
the runtime orders chunks and messages.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from boltmesh.strategies.dry_run.batch_check import BatchDigest
from boltmesh.strategies.dry_run.no_side_effects import no_side_effects
from boltmesh.strategies.patch import patched
from boltmesh.strategies.pipeline.layerwise_eval import layerwise_evaluation
from boltmesh.strategies.pipeline.merge import BatchTail, JoinedRun
from boltmesh.strategies.pipeline.metrics import MetricCalls
from boltmesh.strategies.pipeline.microbatch_runs import (
    Around,
    During,
    Finish,
    MicrobatchRun,
    MicrobatchStage,
    See,
)
from boltmesh.strategies.pipeline.partition.placement import StagePlacement
from boltmesh.strategies.pipeline.pipedream_2bw import DelayedGradients, ParamSites
from boltmesh.strategies.pipeline.runtime.step import StepOutcome
from boltmesh.strategies.pipeline.schedules.actions import RankProgram
from boltmesh.strategies.pipeline.stage.rng import host_random_kept
from boltmesh.strategies.pipeline.stage.stage_run import StageRun
from boltmesh.strategies.pipeline.stage.trace import MetricTrace, refuse_writes
from boltmesh.strategies.pipeline.stage_params import NonStageState
from boltmesh.strategies.pipeline.step_effects import StepEffects
from boltmesh.strategies.pipeline.step_report import NUM_SIGNALS, StepLogs

if TYPE_CHECKING:
    from boltmesh.strategies.pipeline.staged_model import StagedModel


class StepRunner:
    """Runs steps on a placed model. All methods are collective over the pipeline.

    Args:
        model: The model, in the context of the run that places it.
        placement: Its division into stages and its step plans.
        num_microbatches: Microbatches of the sample batch.
    """

    def __init__(
        self, model: "StagedModel", placement: StagePlacement, *, num_microbatches: int
    ) -> None:
        module, holdings, programs = model.module, model.holdings, model.programs
        self.digest = BatchDigest()
        """Digest of the next step's batch."""
        self.runs_layerwise = False
        """Whether a step or function runs layer by layer now."""
        self.effects = StepEffects(module)
        """Options of optimizers and ``should_stop`` that the step of a batch sets."""
        self._module = module
        self._metrics = model.metrics
        self._placement = placement
        self._programs = programs
        self._whole = programs.of(num_microbatches)
        self._end = programs.num_stages - 1
        self._executor = model.executor
        self._sharing = model.sharing
        self._signals = model.signals
        self._context = model.context
        self.non_stage_state = NonStageState(
            module, self._whole.stages, programs.rank_of_stage, model.context.group
        )
        self.delayed: DelayedGradients | None = None
        """Gradients that are applied a step late; None if the schedule is synchronous."""
        if programs.is_asynchronous:
            sites = ParamSites(module, holdings.parameters)
            self.delayed = DelayedGradients(
                sites, holdings.shared, self._finish, model.executor.drop_carried
            )

    def run_batch(
        self,
        run: MicrobatchRun,
        finish: Finish,
        around: Around,
        found: Callable[[StepLogs], Tensor],
        joined: JoinedRun | None = None,
        see: See | None = None,
    ) -> tuple[StepLogs, Tensor]:
        """Run all chunks of this rank for a training batch.

        Args:
            run: The step and its microbatches.
            finish: Takes the results of the last stage.
            around: The precision context.
            found: Returns the row of the last stage's rank, see ``LastStageBroadcast.row``.
            joined: The end of the step on the whole batch; None runs it on each microbatch.
            see: Called with the inputs of each microbatch of a stage.

        Returns:
            The logs of the last stage, and the rows of all ranks, shape ``(R, length)``, fp64.

        Raises:
            PipelineError: A stage failed on any rank, or ranks have different batches.
        """
        try:
            with around():
                runs = self._stage_runs(run)
                if self.delayed is not None:
                    refuse_writes(runs[0][0].plan.trace.events, "with schedule='pipedream_2bw'")
                count = len(run.parts) if joined is None else 1
                called = [each[0].plan.trace.metrics for each in runs]
                metrics = self._metric_calls(run, called, count)
        except Exception as error:  # noqa: BLE001 - sent to all ranks and raised again
            self.refuse(error)
        logs = StepLogs(self._module, metrics)
        self.effects.begin()
        to_end = partial(self._to_end, logs)
        stages = self._stages(run, runs, around, to_end, finish, joined, see)
        report = partial(found, logs) if self._end in self._whole.stages else self._report_stop
        with self._placement.plans.writes.of_batch():
            if self.delayed is None:
                outcome = self._run(self._programs.of(len(run.parts)), stages, report)
            else:
                with self.delayed.batch() as before:
                    program = self._programs.asynchronous(before, len(run.parts))
                    outcome = self._run(program, stages, report)
        self.non_stage_state.share((each[0].plan for each in runs), is_joined=joined is not None)
        return logs, outcome.reports[:, NUM_SIGNALS:]

    def _stages(
        self,
        run: MicrobatchRun,
        runs: Sequence[tuple[StageRun, ...]],
        around: Around,
        to_end: During,
        finish: Finish,
        joined: JoinedRun | None,
        see: See | None,
    ) -> list[MicrobatchStage]:
        """Return this rank's stages.

        The last one runs to the end of the step, or with ``joined`` to its last unit. Changes by
        the step itself are then kept once: on the last stage's rank those of the end of the step,
        on others those of the first microbatch.
        """
        holds_end = self._end in self._whole.stages

        def keeps(microbatch: int) -> bool:
            return joined is None or (microbatch == 0 and not holds_end)

        take = None if joined is None else BatchTail(joined, around, to_end, finish).take
        stages = []
        for index in self._whole.stages:
            is_last = index == self._end
            reaches_end = is_last and joined is None
            own = [each[index] for each in runs]
            during = self.non_stage_state.during(
                to_end if reaches_end else self._quiet, [each.plan for each in own], keeps
            )
            stages.append(
                MicrobatchStage(
                    joined.last if joined is not None and is_last else own,
                    run,
                    around,
                    during,
                    finish if reaches_end else None,
                    is_last=is_last,
                    batch_tail=take if is_last else None,
                    see=see,
                )
            )
        return stages

    def _stage_runs(self, run: MicrobatchRun) -> list[tuple[StageRun, ...]]:
        """Return the stages of each microbatch."""
        return self._placement.plans.stages_of_parts(
            run.step, run.parts, run.rest, run.kwargs, run.seeds
        )

    def _metric_calls(
        self, run: MicrobatchRun, called: Sequence[Sequence[MetricTrace]], count: int
    ) -> MetricCalls:
        """Return an object that keeps the step's calls of metrics."""
        of_batch: Sequence[MetricTrace] = ()
        if any(called):
            plans = self._placement.plans.stages(
                run.step, run.batch, *run.rest, kwargs=run.kwargs, seed=run.seeds[0]
            )
            of_batch = plans[0].plan.trace.metrics
        return MetricCalls(self._metrics, of_batch, count)

    @contextmanager
    def _quiet(self, microbatch: int) -> Iterator[None]:
        with no_side_effects(self._module, self._metrics), self.effects.undone():
            yield

    @contextmanager
    def _to_end(self, logs: StepLogs, microbatch: int) -> Iterator[None]:
        with logs.of_microbatch(microbatch), self.effects.kept():
            yield

    def _report_stop(self) -> Tensor:
        return self._sharing.row_of_other(stops=self.effects.stops())

    def agree(self) -> None:
        """Compare the batches of all ranks by a step without actions. Collective over the pipeline.

        The expected traffic of a step does not count it.

        Raises:
            PipelineError: Ranks have different batches, or one could not begin the step.
        """
        digest = self.digest
        self._run(replace(self._whole, actions=(), num_before=0, carries=False), [])
        self.digest = digest

    def pass_through(
        self, run: MicrobatchRun, last: Sequence[StageRun], around: Around, during: During
    ) -> list[tuple[Tensor, ...]]:
        """Run the units of all stages forward.

        Args:
            run: The step and its microbatches.
            last: The last stage up to its last unit, by microbatch.
            around: The precision context.
            during: Context of each microbatch, on each stage.

        Returns:
            The outputs of ``last`` by microbatch, of the shapes of its ``values_out``; empty on the
            other stages' ranks.
        """
        program = self._programs.of(len(run.parts)).forward_only
        try:
            with around():
                planned = self._stage_runs(run)
        except Exception as error:  # noqa: BLE001 - sent to all ranks and raised again
            self.refuse(error)
        runs = [(*each[: self._end], last[number]) for number, each in enumerate(planned)]
        stages = [
            MicrobatchStage(
                [each[index] for each in runs],
                run,
                around,
                during,
                is_last=index == self._end,
            )
            for index in program.stages
        ]
        outputs = self._run(program, stages).outputs
        return [outputs[number] for number in sorted(outputs)]

    def _run(
        self,
        program: RankProgram,
        stages: Sequence[MicrobatchStage],
        own_report: Callable[[], Tensor] | None = None,
    ) -> StepOutcome:
        digest, self.digest = self.digest, BatchDigest()

        def report() -> Tensor:
            zeros = torch.zeros(self._sharing.length, dtype=torch.float64)
            return torch.cat([self._signals.row(), zeros if own_report is None else own_report()])

        with host_random_kept():
            outcome = self._executor.run(program, stages, digest, report)
        self._signals.receive(outcome.reports[:, :NUM_SIGNALS])
        return outcome

    def run_layerwise(
        self, name: str, function: Callable[[], Any], seed: int, *, seeds: bool = True
    ) -> Any:
        """Run a function of the model, each unit on its rank, and return its result.

        Args:
            name: Name of the function, for errors.
            function: The same on all ranks.
            seed: Seed of random numbers in units.
            seeds: Whether code between units is seeded, too. Otherwise generators go on there, from
                the same state on all ranks.
        """
        made = layerwise_evaluation(
            self._module, self._placement, self._context.group, self._context.device
        )
        with patched(self, runs_layerwise=True), self._executor.guarded(name):
            return made.run(function, seed, seeds=seeds)

    def refuse(self, error: Exception) -> NoReturn:
        """Raise this rank's error on all ranks, in the place of a step."""
        self._executor.refuse(self._whole, error)

    def _finish(self, num_microbatches: int) -> None:
        """Run only the backward passes that are left of ``num_microbatches``."""
        self._run(self._programs.asynchronous(num_microbatches, 0), [])
