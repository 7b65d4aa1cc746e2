"""``StagedModel``: a LightningModule cut into the stages of a pipeline, over all of its runs.

All ranks get the same batch. Each splits it into microbatches and runs its stages of the module's
own step on them (``step_runner.py``, ``stage/``), in the order of the schedule (``runtime/``).
``training.py`` has the training batch, ``evaluation.py`` a batch of the other loops, ``axis.py``
the axis of the engine.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed import ProcessGroup

from boltmesh.errors import ConfigError
from boltmesh.strategies.dry_run.metrics import find_metrics
from boltmesh.strategies.object_collectives import broadcast_object, gather_objects
from boltmesh.strategies.pipeline.expected_traffic import PipelineEstimate
from boltmesh.strategies.pipeline.loss.loss_check import LossChecks
from boltmesh.strategies.pipeline.loss.reduction import BatchLossError
from boltmesh.strategies.pipeline.loss.trial import Trial, sizes_tried
from boltmesh.strategies.pipeline.merge import JoinedRun, join_run
from boltmesh.strategies.pipeline.metrics import MetricBroadcast
from boltmesh.strategies.pipeline.microbatch import (
    PAIR,
    MicrobatchSplitter,
    batch_norms,
    fewest_rows,
    pick,
)
from boltmesh.strategies.pipeline.microbatch_runs import Around, MicrobatchRun, See
from boltmesh.strategies.pipeline.options import (
    AUTOMATIC_SCHEDULE,
    WHOLE_BATCH,
    PipelineContext,
    PipelineOptions,
)
from boltmesh.strategies.pipeline.partition.choose import find_budget
from boltmesh.strategies.pipeline.partition.materialize import DeferredModel
from boltmesh.strategies.pipeline.partition.placement import StagePlacement, place
from boltmesh.strategies.pipeline.pipedream_2bw import DelayedGradients
from boltmesh.strategies.pipeline.row_check import RowCheck
from boltmesh.strategies.pipeline.runtime.failure import PeerPipelines
from boltmesh.strategies.pipeline.runtime.runtime import PipelineRuntime
from boltmesh.strategies.pipeline.schedules.actions import RankPrograms
from boltmesh.strategies.pipeline.stage.plan_cache import TRAINING
from boltmesh.strategies.pipeline.stage.unit_outputs import needed_to_derive
from boltmesh.strategies.pipeline.stage.units import refuse_calls_outside
from boltmesh.strategies.pipeline.stage_params import StageParameters
from boltmesh.strategies.pipeline.step_report import NUM_SIGNALS, LastStageBroadcast, SharedSignals
from boltmesh.strategies.pipeline.step_runner import StepRunner
from boltmesh.strategies.progress import long_phase
from boltmesh.strategies.torch_compat.optimizers import OverflowAgreement
from boltmesh.telemetry.traffic import CONTROL

SEED_STRIDE = 1_000_003
"""Distance of the seeds of two steps: a prime above any number of microbatches."""


class StagedModel:
    """The model of one pipeline; each rank holds its stages.

    Args:
        options: Options of the pipeline.
    """

    def __init__(self, options: PipelineOptions) -> None:
        self.options = options
        self.placement: StagePlacement | None = None
        """None before ``place``."""
        self._overflow = OverflowAgreement()
        self._has_chosen = False
        """Whether the automatic schedule was chosen from the loss of a batch."""
        self._has_checked_rows = False
        """Whether layers were checked for mixed rows."""
        self._has_prepared_checks = False
        """Whether units were run for the checks of the first batch."""
        self.cutter = MicrobatchSplitter()
        self.others = PeerPipelines(1, 1, self._fail)
        """The other pipelines of the job."""
        self.signals = SharedSignals()
        """Signals such as SIGTERM, exchanged between ranks at the end of each run."""

    # Placing the model.

    def begin(self, context: PipelineContext) -> None:
        """Set the context of a run. Called for every run, before ``place``.

        Collective over all ranks.
        """
        self.context = context
        self.others.close()
        count = context.num_replicas * context.num_sharing
        self.others = PeerPipelines(count, dist.get_world_size(), self._fail)

    def place(
        self,
        module: LightningModule,
        step: str,
        batch: Any,
        rest: tuple[Any, ...],
        around: Around,
    ) -> None:
        """Cut the model and free the parameters of other ranks. Collective over all ranks.

        Args:
            module: The whole model. ``make`` materializes its deferred parameters.
            step: The first step method of the run.
            batch: A batch for it.
            rest: The arguments of the step that follow the batch.
            around: The precision context.

        Raises:
            ConfigError: The model or the batch cannot be cut.
        """
        self.close()
        self.placement = None
        self._has_chosen = False
        self._has_checked_rows = False
        self._has_prepared_checks = False
        context = self.context
        self.module = module
        self._norms_of_rows = batch_norms(module, of_vectors=True)
        self.metrics = find_metrics(module)
        programs = self.programs = RankPrograms(
            self.options, context.group.size(), context.group.rank()
        )
        parts = self.parts_of(batch)[0]
        self._unmade = DeferredModel(module)
        with around():
            placement = place(
                module,
                step,
                (parts[0], *rest),
                rank_of_stage=programs.rank_of_stage,
                split=self.options.split,
                context=context,
                budget=find_budget(
                    self.options.max_memory_bytes,
                    programs.live(len(parts)),
                    num_versions=2 if programs.is_asynchronous else 1,
                    num_communicators=context.num_communicators,
                    group=context.group,
                    device=context.device,
                ),
                unmade=self._unmade,
            )
        if placement.division.sees_one_value:
            self._norms_of_rows = batch_norms(module)
            parts = self.parts_of(batch)[0]
        self.last = dist.get_global_rank(context.group, programs.rank_of_stage[-1])
        self.holds_last_stage = dist.get_rank() == self.last
        self.loss_checks = LossChecks(context.device)
        self.sharing = LastStageBroadcast(context.group, self.last, context.device)
        self.executor = self._build_executor(context)
        self._tracing_group = self._find_tracing_group(context)
        self.metric_sharing = MetricBroadcast(
            self.metrics, context.group, self.last, context.device, self.executor.control_group
        )
        self.holdings = StageParameters(module, placement.division, context)
        self.runner = StepRunner(self, placement, num_microbatches=len(parts))
        placement.plans.check = self.holdings.refuse_unheld
        self.expectations = PipelineEstimate(self, placement, num_microbatches=len(parts))
        self.placement = placement

    def make(self) -> None:
        """Materialize the deferred parameters of this rank's stages on the device.

        Called after all dry runs on the CPU, which need the whole model there.
        """
        assert self.placement is not None
        self._unmade.make(set(self.holdings.parameters), self.context.device)
        refuse_calls_outside(self.placement.plans.units)

    def _build_executor(self, context: PipelineContext) -> PipelineRuntime:
        """Return the runtime of this model for all runs. Collective over all ranks."""
        num_ranks = context.group.size()
        return PipelineRuntime(
            context.group,
            context.device,
            on_chunk=self._record_chunk,
            on_peak=self._record_peak,
            name_of=self._name_of,
            timeout=context.timeout,
            on_stuck=self._fail,
            explain=self._explain,
            waits_within=context.waits_within,
            control_group=context.new_group(backend="gloo") if num_ranks > 1 else None,
            gradient_group=(
                context.new_group() if num_ranks > 1 and context.device.type == "cuda" else None
            ),
            report_length=lambda: NUM_SIGNALS + self.sharing.length,
        )

    def _find_tracing_group(self, context: PipelineContext) -> ProcessGroup | None:
        """Return the CPU group of ranks whose units have equal outputs; None for one rank.

        Collective over all ranks. They have the same batches, and parameters of equal shapes: those
        of a layer that cannot be divided evenly differ by rank.
        """
        group = context.new_tracing_group() if context.num_sharing > 1 else None
        shapes = [tuple(each.shape) for each in self.module.parameters()]
        if group is not None and all(each == shapes for each in gather_objects(shapes, group)):
            return group
        return self.executor.control_group

    def prepare_checks(self, run: MicrobatchRun, around: Around) -> None:
        """Agree on the first batch, and share what units give for it, its parts and its checks.

        Collective over ranks with the same batches.

        Raises:
            PipelineError: Ranks have different batches, or one cannot begin the step.
        """
        if self._has_prepared_checks:
            return
        self.runner.agree()
        self._has_prepared_checks = True  # the agreement ends in the same way on all ranks
        if len(run.parts) == 1:
            return
        rows = self.cutter.rows(run.batch)
        tried = set() if self.programs.has_forwards_first else sizes_tried(rows.count)
        tried |= {PAIR} if run.sizes[0] < PAIR else set()
        known = {**dict(zip(run.sizes, run.parts, strict=True)), rows.count: run.batch}
        others = {each: pick(run.batch, rows, range(each)) for each in tried - known.keys()}
        known |= {each: others.pop(each) for each in needed_to_derive(known, others)}
        assert self.placement is not None
        plans = self.placement.plans
        with around():
            self.share_outputs([*run.parts, *known.values()], run.rest, run.kwargs)
            plans.derive_outputs(TRAINING, known, others, run.rest, run.kwargs)
            with plans.trying():
                self.share_outputs(others.values(), run.rest, run.kwargs)

    def share_outputs(
        self, batches: Iterable[Any], rest: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Run the units for several batches of training on fake tensors, each kind on one rank.

        Collective over ranks with the same batches. The caller sets the precision context.
        """
        if self._tracing_group is not None:
            assert self.placement is not None
            plans, seed, group = self.placement.plans, self.context.seed, self._tracing_group
            share = partial(plans.share_outputs, TRAINING, batches, rest, kwargs, seed, group)
            self.others.run_collective(share)

    def move_absent(self, device: torch.device) -> None:
        """Set the device of absent parameters, before the model is moved to it."""
        if self.placement is not None:
            self.holdings.move_absent(device)

    def start(self) -> None:
        """Broadcast shared state, with parameters on the device. Collective over the pipeline."""
        assert self.placement is not None
        self.holdings.shared.broadcast()
        # Without a seed ranks have drawn different values.
        self.runner.non_stage_state.broadcast(self.placement.division.loose_buffers)

    def record_plan(self, accumulated: int) -> None:
        """Record the plan of the run. Called for every run.

        Args:
            accumulated: Batches in an optimizer step.
        """
        recorder = self.context.recorder
        for group in self.holdings.shared.groups():
            recorder.name_group(group, "pipeline")
        if self.executor.control_group is not None:
            recorder.name_group(self.executor.control_group, CONTROL)
        if self.executor.gradient_group is not None:
            recorder.name_group(self.executor.gradient_group, "pipeline")
        if self._tracing_group is not None:
            recorder.name_group(self._tracing_group, CONTROL)
        recorder.schedule(self.expectations.plan(accumulated))

    def follow_scaler(self) -> None:
        """Make all stages skip a step if the gradients of one overflow.

        Called before training; lasts until ``close``.
        """
        context = self.context
        self._overflow.begin(context.scaler, context.group, context.device)

    def close(self) -> None:
        """Stop background work. Parameters do not change."""
        self._overflow.end()
        self.signals.forget()
        self.others.close()
        if self.placement is not None:
            self.executor.close()
            if self.delayed is not None:
                self.delayed.abandon()

    # Steps.

    @property
    def delayed(self) -> DelayedGradients | None:
        """Gradients that are applied a step late; None if the schedule is synchronous."""
        return None if self.placement is None else self.runner.delayed

    def drain(self) -> None:
        """Run the backward passes that were left for the next batch. Collective over the pipeline.

        Called before anything other than a training batch.
        """
        if self.delayed is not None:
            self.delayed.drain()

    def find_metrics(self) -> None:
        """Find the module's metrics, which it may make at any time before a loop begins."""
        self.metrics.clear()
        self.metrics.update(find_metrics(self.module))

    def before_batch(self) -> None:
        """Let the data axis prepare parameters for a batch. Collective over all ranks.

        A failure ends the step on the whole pipeline: an optimizer step on the host or on a disk
        may have failed on this rank alone.
        """
        try:
            self.others.run_collective(self.context.data.before_batch)
        except Exception as error:  # noqa: BLE001 - sent to all ranks and raised again
            self.runner.refuse(error)

    def cut(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Return a batch's microbatches and their numbers of rows.

        Collective over the pipeline if the batch cannot be cut, so that no rank waits for this one.
        """
        try:
            return self.parts_of(batch)
        except Exception as error:  # noqa: BLE001 - sent to all ranks and raised again
            self.runner.refuse(error)

    def cut_if_possible(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Return a batch's microbatches, or the whole batch if it cannot be cut.

        The whole batch, too, if ranks of other pipelines, which may have more batches, compute
        layers with this one.
        """
        if self.context.coupled is not None:
            return [batch], [1]
        try:
            return self.parts_of(batch)
        except ConfigError:
            return [batch], [1]

    def parts_of(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Return a batch's microbatches; raises on this rank alone if it cannot be cut."""
        wanted = self.options.num_microbatches(self.context.group.size())
        if wanted == 1:
            return [batch], [1]
        return self.cutter.cut(batch, wanted, fewest_rows(self._norms_of_rows))

    def check_coupled(self, number: float | Tensor, text: str) -> None:
        """Refuse a number of this batch that differs on ranks that compute layers with this one.

        Collective over these ranks.

        Args:
            number: Equal on all ranks of the pipeline, shape ``()`` if a tensor; read only if there
                are such ranks.
            text: Format of the error, with places for the smallest and the largest number.

        Raises:
            ConfigError: The numbers differ; raised on all of these ranks.
        """
        group = self.context.coupled
        if group is None:
            return
        number = float(number)
        numbers = torch.tensor([number, -number], dtype=torch.float64)
        reduce = partial(dist.all_reduce, numbers, dist.ReduceOp.MIN, group=group)
        self.others.run_collective(lambda: reduce() and None)
        least, most = numbers[0].item(), -numbers[1].item()
        if not math.isclose(least, most, rel_tol=1e-6):
            raise ConfigError(text.format(least, most))

    @property
    def has_open_schedule(self) -> bool:
        """Whether the loss of the next batch decides the schedule."""
        return self.options.schedule == AUTOMATIC_SCHEDULE and not self._has_chosen

    def choose_schedule(
        self, run: MicrobatchRun, around: Around, trial: Callable[[], Trial]
    ) -> None:
        """Change to ``gpipe`` if the loss needs the whole batch. Collective over the pipeline."""
        with long_phase(
            "looks for the schedule that the loss needs", is_shown=dist.get_rank() == 0
        ):
            joined, problem = self._find_schedule(run, around, trial)
        self._has_chosen = True
        if problem is None:
            return
        if isinstance(joined, str):
            self.runner.refuse(problem.without_joining(joined))
        self.programs.change_schedule(WHOLE_BATCH)
        rank_zero_info(
            f"boltmesh: schedule='{WHOLE_BATCH}' is used in place of 1f1b: {problem.what} The last "
            f"stage computes the loss of the whole batch at once, and each stage keeps what all "
            f"microbatches need for their backward passes."
        )

    def _find_schedule(
        self, run: MicrobatchRun, around: Around, trial: Callable[[], Trial]
    ) -> tuple[JoinedRun | str, BatchLossError | None]:
        """Return how microbatches are joined, and why their losses cannot be added up, or None.

        Collective over the pipeline.
        """
        joined = self._join(run, around)
        if isinstance(joined, JoinedRun):  # the same on all ranks
            if joined.scalars:
                what = f"The loss may be made of {joined.scalars[0]}, a number."
                return joined, BatchLossError(what)
            if self.context.coupled is not None:
                what = "Experts get rows of several batches, each with a loss of its own."
                return joined, BatchLossError(what)
        return joined, self._find_problem(trial)

    def _find_problem(self, trial: Callable[[], Trial]) -> BatchLossError | None:
        """Return why losses of microbatches cannot be added up. Collective over the pipeline."""
        texts: tuple[str, str] | None = None
        with suppress(Exception):  # raised again within the step, on all ranks
            problem = self.loss_checks.find_problem(trial) if self.holds_last_stage else None
            texts = None if problem is None else (problem.what, problem.instead)
        texts = broadcast_object(texts, self.last, self.context.group)
        return None if texts is None else BatchLossError(*texts)

    def join(self, run: MicrobatchRun, around: Around) -> JoinedRun | str | None:
        """Return how the outputs of microbatches are joined to the batch's.

        Returns:
            The reason if they cannot be joined; None if backward passes begin before all outputs
            exist.
        """
        return self._join(run, around) if self.programs.has_forwards_first else None

    def _join(self, run: MicrobatchRun, around: Around) -> JoinedRun | str:
        assert self.placement is not None
        try:
            with around():
                return join_run(self.placement.plans, run, run.sizes)
        except ConfigError as error:  # the same on all ranks: one batch, one plan
            return str(error)
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            self.runner.refuse(error)

    def row_check(self, run: MicrobatchRun) -> See | None:
        """Return the check of the first microbatches of the first batch, see ``RowCheck``.

        None if ranks of other pipelines compute layers with this one, since their collectives would
        be matched with those of the check; and if the rounding of a row depends on other rows.
        """
        context = self.context
        if self._has_checked_rows or context.coupled is not None or context.rounds_by_microbatch:
            return None
        self._has_checked_rows = True
        assert self.placement is not None
        return RowCheck(self.placement.plans, run, self.cutter.rows(run.batch)).see

    def seeds(self, ordinal: int, count: int) -> list[int]:
        """Return the seed of each microbatch of the batch with this number."""
        start = self.context.seed + SEED_STRIDE * (ordinal + 1)
        return [(start + number) % 2**63 for number in range(count)]

    def average(self, *, has_loss: bool) -> None:
        """Average gradients over the pipelines of the job. Collective over all ranks.

        Args:
            has_loss: Whether the batch has a loss, and gradients.
        """

        def average() -> None:
            is_averaged = self.context.data.reduce_gradients(has_loss=has_loss)
            if is_averaged and self.context.shared_averages_may_differ:
                self.holdings.shared.broadcast_gradients()

        self.others.run_collective(average)

    # Callbacks of the runtime.

    def _record_chunk(
        self, stage: int, microbatch: int, kind: str, start_ns: int, end_ns: int
    ) -> None:
        self.context.recorder.chunk(
            stage=stage, microbatch=microbatch, kind=kind, start_ns=start_ns, end_ns=end_ns
        )

    def _record_peak(self, peaks: Mapping[int, int]) -> None:
        self.context.recorder.live_microbatches(peaks)

    def _explain(self, error: BaseException) -> None:
        self.context.recorder.explain(error)
        self.others.annotate(error)

    def _fail(self, error: BaseException) -> None:
        self.context.recorder.fail(error)

    def _name_of(self, module: torch.nn.Module) -> str | None:
        return next((name for name, each in self.module.named_modules() if each is module), None)
