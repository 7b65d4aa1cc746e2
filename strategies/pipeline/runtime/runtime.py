"""Runs the steps of a pipeline on one rank."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from boltmesh.errors import BoltMeshError, ConfigError, PipelineError
from boltmesh.failure_board import SPREAD_S, Deadline, FailureBoard
from boltmesh.schedule_sim import RECEIVES, SENDS, Action
from boltmesh.strategies.dry_run.batch_check import BatchDigest
from boltmesh.strategies.pipeline.runtime.failure import describe_failure
from boltmesh.strategies.pipeline.runtime.handshake import DisagreementError, Handshake
from boltmesh.strategies.pipeline.runtime.p2p import StageTransport
from boltmesh.strategies.pipeline.runtime.stage import PipelineStage, Specs
from boltmesh.strategies.pipeline.runtime.step import Carried, PipelineStep, StepOutcome
from boltmesh.strategies.pipeline.runtime.timing import BubbleMeter, OnChunk, build_spans
from boltmesh.strategies.pipeline.schedules.actions import RankProgram

_NO_BATCH: Final = BatchDigest()

_COMMUNICATION = SENDS | RECEIVES

OnPeak = Callable[[Mapping[int, int]], None]

_ALONE: Final = itertools.count()
"""Numbers the runtimes of single ranks, so that a cause of one is not read in the next."""


def _no_report() -> Tensor:
    return torch.empty(0, dtype=torch.float64)


class PipelineRuntime:
    """Executes one rank's part of a schedule, step after step. Made collectively over the group.

    Args:
        group: The ranks of the pipeline axis; None if a single rank has all stages.
        device: Device of the stages.
        on_chunk: Called after each chunk with stage, microbatch, kind (F, B, I, W), start (after
            its inputs arrived) and end (before it sends), in ns of the monotonic clock. Two steps
            late on a GPU.
        on_peak: Called after each run with backward passes with the most microbatches that were
            kept at the same time, by stage.
        name_of: Returns a module's name for errors.
        timeout: Limit of waits of ranks for each other between steps; None: torch's default.
        on_stuck: See ``FailureBoard``.
        explain: Adds the cause of a lost message to its error.
        waits_within: Whether a stage waits for ranks outside of the pipeline that compute it, too.
        control_group: The same ranks in a separate group on the CPU; by default made here, by all
            ranks of the job together.
        gradient_group: See ``StageTransport``.
        report_length: Called at the beginning of each run; returns the length of a report in
            numbers, equal on all ranks.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        device: torch.device,
        *,
        on_chunk: OnChunk = lambda *_: None,
        on_peak: OnPeak = lambda _: None,
        name_of: Callable[[Module], str | None] = lambda _: None,
        timeout: timedelta | None = None,
        on_stuck: Callable[[BoltMeshError], None] = lambda _: None,
        explain: Callable[[BaseException], None] = lambda _: None,
        waits_within: bool = False,
        control_group: ProcessGroup | None = None,
        gradient_group: ProcessGroup | None = None,
        report_length: Callable[[], int] = lambda: 0,
    ) -> None:
        self._report_length = report_length
        self._device = device
        self._timeout, self._explain = timeout, explain
        self._waits_within = waits_within
        self._name_of = name_of
        self._global_rank = dist.get_rank() if group is not None else 0
        self._transport = StageTransport(group, device, gradient_group)
        self._on_peak = on_peak
        self.gradient_group = gradient_group
        self.control_group = control_group
        """The ranks of the axis on the CPU, for handshakes."""
        if control_group is None and group is not None and dist.get_world_size(group) > 1:
            self.control_group = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout,
                backend="gloo",
                group_desc="pipeline control",
            )
        self._meter = BubbleMeter(self.control_group, device)
        self._spans = build_spans(device, on_chunk, self._meter.measured)
        name = (
            f"alone-{self._global_rank}-{next(_ALONE)}"
            if self.control_group is None
            else self.control_group.group_name
        )
        self._carried: Carried | None = None
        """Work that the newest step with backward passes left for the next one."""
        self._board = FailureBoard(
            self._global_rank, f"pipeline-{name}", error=PipelineError, on_stuck=on_stuck
        )

    @property
    def bubble(self) -> float | None:
        """Return the mean bubble ratio of the newest runs, equal on all ranks; None without any.

        Idle time over the common window of whole training runs, a mean over the ranks and at most
        ``timing.MEAN_RUNS`` runs, from 0 to 1. A run counts when the next one has begun; on a GPU
        two runs later.
        """
        return self._meter.bubble

    def run(
        self,
        program: RankProgram,
        stages: Sequence[PipelineStage],
        batch: BatchDigest = _NO_BATCH,
        report: Callable[[], Tensor] = _no_report,
    ) -> StepOutcome:
        """Execute a list of actions. Collective over the group.

        Accumulates into ``.grad`` of parameters. A run that fails on any rank fails on all of them
        within the time of a chunk, and the runtime can be used again.

        Args:
            program: The actions of this rank. Work that a program leaves for the next step has to
                be in the next program with backward passes; runs without any may come between.
            stages: This rank's stages, ready for the microbatches of this step; none are needed
                for backward passes of the batch before.
            batch: Digest of this rank's batch.
            report: Called at the end of the run; returns this rank's report, shape
                ``(report_length,)``, fp64.

        Returns:
            Outputs of the last stage, peaks and the reports of all ranks.

        Raises:
            PipelineError: A stage or ``report`` raised on any rank, stages do not fit together, or
                ranks have different batches.
        """
        with self._board.monitoring():
            return self._run(program, {stage.index: stage for stage in stages}, batch, report)

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Return a context in which an error of one rank ends collective code of the pipeline.

        Args:
            what: Name of that code, for the error of the other ranks.
        """
        with self._board.monitoring():
            try:
                yield
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                self._board.post(f"Rank {self._global_rank} failed in {what}: {text}")
                raise

    def refuse(self, program: RankProgram, error: Exception) -> NoReturn:
        """Take part in a step that this rank cannot begin; the other ranks end it with its cause.

        Collective over the group, in the place of ``run``.

        Args:
            program: Any program of this rank.
            error: Why it cannot begin.

        Raises:
            PipelineError: With the first cause of any rank.
            ConfigError: ``error`` itself, if it is one.
        """
        stages = ", ".join(map(str, program.stages))
        cause = (
            f"Rank {self._global_rank}, which has stage {stages}, could not begin the step: "
            f"{type(error).__name__}: {error}"
        )
        try:
            with self._board.monitoring():
                self._board.post(cause)
                handshake = self._handshake(program, None, _NO_BATCH)
                self._end(handshake, StepOutcome(), error)
        except PipelineError as first:
            if isinstance(error, ConfigError):
                raise error from None
            raise first from error
        raise error

    def close(self) -> None:
        """Stop the thread that monitors failures."""
        self._board.close()

    def _handshake(
        self, program: RankProgram, specs: tuple[Specs, Specs] | None, batch: BatchDigest
    ) -> Handshake:
        deadline, length = Deadline(self._timeout), self._report_length()
        return Handshake(self.control_group, program, specs, batch, self._meter, deadline, length)

    def _run(
        self,
        program: RankProgram,
        stages: dict[int, PipelineStage],
        batch: BatchDigest,
        report: Callable[[], Tensor],
    ) -> StepOutcome:
        error: BaseException | None = None
        specs: tuple[Specs, Specs] | None = None
        try:
            specs = _ask_specs(program, stages)
        except Exception as caught:  # noqa: BLE001 - sent to all ranks and raised by _end
            error = self._post(caught, None)
        handshake = self._handshake(program, specs, batch)
        if specs is None:
            return self._end(handshake, StepOutcome(), error)
        carried = None
        if program.has_backward:
            carried, self._carried = self._carried, None
        assert (carried is not None) == bool(program.num_before)
        step = PipelineStep(
            program, stages, *specs, self._transport, self._spans, self._device, carried
        )
        step.known_failure = lambda: self._board.cause
        del carried  # the step frees its graphs one by one
        error = self._perform(step, program, handshake)
        self._spans.end_step(self._meter.number)
        if program.has_backward and error is None:
            self._on_peak(step.outcome.peak_live)
        return self._end(handshake, step.outcome, error, report)

    def _perform(
        self, step: PipelineStep, program: RankProgram, handshake: Handshake
    ) -> BaseException | None:
        """Perform all actions, or after a failure the messages that are due; return the error."""
        board = self._board
        actions = program.actions
        done = 0
        action = None
        began_s = time.monotonic()
        try:
            for action in actions:
                began_s = time.monotonic()
                if board.cause is not None:
                    break
                if action.kind in _COMMUNICATION:
                    handshake.wait()
                step.perform(action)
                done += 1
                board.note_progress()
            else:
                action = None
                began_s = time.monotonic()
                handshake.wait()
                left = step.finish()
                if program.has_backward:
                    self._carried = left
                return None
            error: BaseException = PipelineError(board.cause)
        except DisagreementError as caught:
            step.abandon()
            return caught
        except Exception as caught:  # noqa: BLE001 - sent to all ranks and raised by _end
            error = self._post(caught, action, program)
        except BaseException as caught:
            self._post(caught, action, program)
            raise
        handshake.deadline.begin(began_s)
        if self._waits_within:  # see [Note: Failing within a shared stage] in failure.py
            handshake.deadline.begin(-math.inf)
            time.sleep(SPREAD_S)
        try:
            handshake.wait()
        except DisagreementError as caught:
            step.abandon()
            return caught
        # See [Note: Failing together] in failure.py.
        step.drain_after_failure(actions[done:], handshake.deadline)
        return error

    def drop_carried(self) -> None:
        """Free the work that was left for the next step, which will not run."""
        self._carried = None

    def _post(
        self, error: BaseException, action: Action | None, program: RankProgram | None = None
    ) -> BaseException:
        self._explain(error)  # at once, while the state of the wait is current
        batch = ""
        if action is not None and program is not None and action.microbatch < 0:
            action = action._replace(microbatch=program.number(action))
            batch = " of the batch before"
        text = describe_failure(
            error, action, rank=self._global_rank, name_of=self._name_of, batch=batch
        )
        self._board.post(text)
        return error

    def _end(
        self,
        handshake: Handshake,
        outcome: StepOutcome,
        error: BaseException | None,
        report: Callable[[], Tensor] = _no_report,
    ) -> StepOutcome:
        """Return the outcome if no rank has failed; else raise the first cause on all ranks."""
        mine = None
        if error is None:
            try:
                mine = report()
            except Exception as caught:  # noqa: BLE001 - sent to all ranks and raised below
                error = self._post(caught, None)
        try:
            try:
                handshake.wait()
            except DisagreementError as caught:
                error = caught
            reports = handshake.finish(mine if error is None else None)
            if reports is not None:
                self._meter.note_sync_point()
                outcome.reports = reports
                return outcome
        except Exception as caught:  # noqa: BLE001 - a rank is gone: sent to all and raised below
            error = error or self._post(caught, None)
            handshake.deadline.begin(-math.inf)
        self.drop_carried()
        said = isinstance(error, DisagreementError) and str(error)
        cause = said or self._board.wait_first()
        handshake.wait_for_all()
        self._board.reset()
        # The traceback of a failing rank ends in its stage; the other ranks have none.
        raise PipelineError(cause) from error


def _ask_specs(program: RankProgram, stages: dict[int, PipelineStage]) -> tuple[Specs, Specs]:
    """Return the values that each stage sends and expects, by stage and microbatch."""
    given, awaited = {}, {}
    for index in program.stages:
        for microbatch in program.microbatches:
            given[index, microbatch] = stages[index].values_out(microbatch)
            awaited[index, microbatch] = stages[index].values_in(microbatch)
    return given, awaited
