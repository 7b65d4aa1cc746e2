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
from boltmesh.strategies.pipeline.runtime.stage import PipelineStage
from boltmesh.strategies.pipeline.runtime.step import Carried, PipelineStep, Specs, StepOutcome
from boltmesh.strategies.pipeline.runtime.timing import BubbleMeter, OnChunk, build_spans
from boltmesh.strategies.pipeline.schedules.actions import RankProgram

_NO_BATCH: Final = BatchDigest()

_COMMUNICATION = SENDS | RECEIVES

OnPeak = Callable[[Mapping[int, int]], None]

_ALONE: Final = itertools.count()
"""Numbers the runs of single ranks: what one has posted is not read in the next."""


def _no_report() -> Tensor:
    return torch.empty(0, dtype=torch.float64)


class PipelineRuntime:
    """Performs one rank's part of a schedule, step after step. Collective to make, over the group.

    Args:
        group: The ranks of the pipeline axis; None where a single rank has all stages.
        device: Where stages compute.
        on_chunk: Told of each chunk when it was computed: stage, microbatch, kind (F, B, I, W),
            start after what it waits for was received and end before anything is sent, in ns of
            the monotonic clock. Of a GPU two steps late.
        on_peak: Told after each run with backward passes, by stage, how many microbatches were
            kept at once at most.
        name_of: Gives a module the name that errors call it by.
        timeout: How long ranks may wait for each other between steps; None: torch's default.
        on_stuck: See ``FailureBoard``.
        explain: Puts into an error by which a message was given up why it did not come.
        waits_within: Whether a stage waits for ranks outside of the pipeline, which share it.
        control_group: The same ranks on the CPU, of its own; by default made here, by all ranks of
            the job together.
        gradient_group: See ``StageTransport``.
        report_length: Returns, at the beginning of each run, the numbers of a report; equal on all
            ranks.
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
        """The ranks of the axis on the CPU, where they agree on whether a step is to be."""
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
        """What the newest step with backward passes has left to the next one."""
        self._board = FailureBoard(
            self._global_rank, f"pipeline-{name}", error=PipelineError, on_stuck=on_stuck
        )

    @property
    def bubble(self) -> float | None:
        """Return the mean bubble of the newest runs, the same on all ranks.

        Of whole training runs: idle time over the common window, the mean over the ranks and
        at most ``timing.MEAN_RUNS`` runs, 0 to 1. A run counts when the next one has begun; on a
        GPU two runs later.
        """
        return self._meter.bubble

    def run(
        self,
        program: RankProgram,
        stages: Sequence[PipelineStage],
        batch: BatchDigest = _NO_BATCH,
        report: Callable[[], Tensor] = _no_report,
    ) -> StepOutcome:
        """Work off a list of actions. Collective over the group.

        Gradients are added to those that parameters have. A run that fails on any rank fails on
        all of them, within the time that a chunk takes, and the executor can be used again.

        Args:
            program: The actions of this rank. What one leaves to the next step with backward
                passes, that one has to do; runs without any may come between.
            stages: Its stages, ready for the microbatches of this step; none are needed for
                backward passes of the batch before.
            batch: What this rank says of the batch that they compute with.
            report: Returns this rank's row for the others, once the run is over.

        Raises:
            PipelineError: A stage or ``report`` raised, on whichever rank, or stages do not fit
                together, or ranks have different batches.
        """
        with self._board.monitoring():
            return self._run(program, {stage.index: stage for stage in stages}, batch, report)

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Within, an error of one rank ends the collective code of all ranks of the pipeline.

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
        """Take part in a step that this rank cannot begin: the other ranks end it with its cause.

        Collective over the group, in the place of ``run``.

        Args:
            program: Any of this rank.
            error: Why it cannot.

        Raises:
            PipelineError: With the first cause of any rank; ``error`` itself where the user can
                mend it.
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
        """End the thread that looks for failures."""
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
        except Exception as caught:  # noqa: BLE001 - told to all ranks and raised by _end
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
        del carried  # the step lets go of its graphs one by one
        error = self._perform(step, program, handshake)
        self._spans.end_step(self._meter.number)
        if program.has_backward and error is None:
            self._on_peak(step.outcome.peak_live)
        return self._end(handshake, step.outcome, error, report)

    def _perform(
        self, step: PipelineStep, program: RankProgram, handshake: Handshake
    ) -> BaseException | None:
        """Do all actions, or in their place what other ranks wait for; return what went wrong."""
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
        except Exception as caught:  # noqa: BLE001 - told to all ranks and raised by _end
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
        """Let go of what was left to a next step, which will not come."""
        self._carried = None

    def _post(
        self, error: BaseException, action: Action | None, program: RankProgram | None = None
    ) -> BaseException:
        self._explain(error)  # while what is known of the wait is new
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
        """Return the outcome if all ranks have one; else raise the first cause on all of them."""
        mine = None
        if error is None:
            try:
                mine = report()
            except Exception as caught:  # noqa: BLE001 - told to all ranks and raised below
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
        except Exception as caught:  # noqa: BLE001 - a rank is gone: told to all and raised below
            error = error or self._post(caught, None)
            handshake.deadline.begin(-math.inf)
        self.drop_carried()
        said = isinstance(error, DisagreementError) and str(error)
        cause = said or self._board.wait_first()
        handshake.wait_for_all()
        self._board.reset()
        # Its own traceback ends in the stage; of other ranks there is none.
        raise PipelineError(cause) from error


def _ask_specs(program: RankProgram, stages: dict[int, PipelineStage]) -> tuple[Specs, Specs]:
    """Return what each stage gives and awaits in each microbatch."""
    given, awaited = {}, {}
    for index in program.stages:
        for microbatch in program.microbatches:
            given[index, microbatch] = stages[index].values_out(microbatch)
            awaited[index, microbatch] = stages[index].values_in(microbatch)
    return given, awaited
