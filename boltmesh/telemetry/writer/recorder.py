"""Records a running rank for the engine and the Lightning callback.

A ``Recorder`` writes the rank's telemetry file; a ``NullRecorder`` takes the same calls and does
nothing. ``open_recorder`` returns the one or the other. Whatever goes wrong inside a recorder
turns it off with one warning: training does not notice.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from boltmesh.process import encodable
from boltmesh.telemetry import layout
from boltmesh.telemetry.hang_detection.watch import HangWatch, start_watch
from boltmesh.telemetry.job import JobInfo, is_switched_off, record_end
from boltmesh.telemetry.plan_files import write_plan, write_tensor_plan
from boltmesh.telemetry.reader.cause import is_consequence
from boltmesh.telemetry.redaction import redact_text
from boltmesh.telemetry.snapshot import (
    PHASES,
    MemoryKind,
    OffloadDirection,
    OffloadPlace,
    PipelinePlan,
)
from boltmesh.telemetry.tensor_plan import TensorPlanTable
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.telemetry.writer import device as devices
from boltmesh.telemetry.writer.communication import (
    CommunicationCounter,
    ExpertCounter,
    OffloadCounter,
)
from boltmesh.telemetry.writer.memory import MemorySampler, TensorsByKind
from boltmesh.telemetry.writer.null_recorder import NullRecorder, guarded, warn_off
from boltmesh.telemetry.writer.output import keep_output
from boltmesh.telemetry.writer.phases import (
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    FORWARD,
    OTHER,
    VALIDATION,
    PhaseClock,
    PhaseContext,
)
from boltmesh.telemetry.writer.rank_file import RankFile
from boltmesh.telemetry.writer.register import introduce, open_file, open_host
from boltmesh.telemetry.writer.status_line import StatusLine
from boltmesh.telemetry.writer.step_queue import EndedStep, StepQueue
from boltmesh.telemetry.writer.throughput import BatchFlops, FlopCounter
from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES

if TYPE_CHECKING:
    from boltmesh.telemetry.writer.nodes import NodeExchange

MAX_PATH: Final = 4096


def open_recorder(
    job: JobInfo,
    *,
    rank: int,
    local_rank: int,
    device: torch.device,
    coordinates: dict[str, int],
    is_fit: bool = False,
) -> "Recorder | NullRecorder":
    """Open this rank's recorder. Never raises: a problem is one warning."""
    if is_switched_off():
        return NullRecorder()
    try:
        return Recorder.open(
            job,
            rank=rank,
            local_rank=local_rank,
            device=device,
            coordinates=coordinates,
            is_fit=is_fit,
        )
    except Exception as error:  # noqa: BLE001 - telemetry never stops training
        warn_off(error)
        return NullRecorder()


class Recorder:
    """Records one rank, from the start of its process group to the end of the run.

    Not for direct construction: ``open_recorder`` or ``Recorder.open``. All methods but
    ``rank_died``, ``offload`` and ``event`` belong to the thread that trains.
    """

    def __init__(self, file: RankFile, *, local_rank: int, device: torch.device) -> None:
        self.is_on = True
        self._local_rank = local_rank
        self._compute: dict[str, float | None] = {}
        self._flops: FlopCounter | None = None
        self.path = file.path.parent
        self._file = file
        self._is_cuda = device.type == "cuda"
        self._timeline = devices.CudaTimeline(OTHER) if self._is_cuda else None
        self._clock = PhaseClock(self._timeline, COLLECTIVES)
        self._memory = MemorySampler(file, device)
        load = devices.DeviceLoad(devices.uuid(device))
        self._steps = StepQueue(file, self._timeline, self._memory, load)
        self._counter = CommunicationCounter(
            file, self._clock, is_on_device=self._is_cuda, on_error=self.turn_off
        )
        self._counter.step = file.num_steps + 1
        enter, leave = self._enter_phase, self._leave_phase
        self._phases = {
            name: PhaseContext(enter, leave, index) for index, name in enumerate(PHASES)
        }
        self._status = StatusLine(file, self._clock, self._steps, self._memory)
        self._offload = OffloadCounter(file)
        self._experts = ExpertCounter(file.path, is_new=file.is_new)
        self._failing: tuple[int, int] | None = None
        self._nodes: NodeExchange | None = None
        self._live: dict[int, int] = {}
        self._hangs: HangWatch | None = None

    @classmethod
    def open(
        cls,
        job: JobInfo,
        *,
        rank: int,
        local_rank: int,
        device: torch.device,
        coordinates: dict[str, int],
        is_fit: bool = False,
    ) -> "Recorder":
        """Create this rank's file in the job's folder and begin to count collectives.

        What this process recorded under the same id is continued, but for a fit.

        Raises:
            TelemetryError: The folder or the file cannot be had.
            OSError: As the system says it.
        """
        file = open_file(job, rank, is_fit=is_fit)
        recorder = None
        try:
            recorder = cls(file, local_rank=local_rank, device=device)
            if local_rank == 0:
                recorder._nodes = open_host(job, file)
            note = recorder._counter.start()
            introduce(job, file, device, coordinates, note)
            recorder._memory.sample()
            recorder._status.write()
            with contextlib.suppress(OSError):  # the rest is worth having without it
                keep_output(file.path.with_suffix(".log"))
        except BaseException:
            if recorder is not None:
                recorder._counter.remove()
            file.close()
            raise
        return recorder

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which time belongs to ``name``, one of PHASES.

        Phases nest and are exclusive: the outer one pauses. See [Note: What is exposed
        communication] in ``phases.py``.
        """
        return self._phases[name]

    @contextlib.contextmanager
    def device_wait(self) -> Iterator[None]:
        """Return a context in which the device's stream waits for communication.

        For any thread of the step. The host runs ahead of a device, so the time counts on the
        device's timeline alone; without a device the collectives tell how long they are waited for.
        """
        timeline = self._timeline if self.is_on else None
        if timeline is None or self._clock.phase in {VALIDATION, CHECKPOINT}:
            yield
            return
        timeline.mark(COMMUNICATION)
        try:
            yield
        finally:
            timeline.mark(self._clock.phase)

    @guarded
    def _enter_phase(self, index: int) -> None:
        if get_ident() == self._clock.thread:
            self._clock.enter(index)
            self._status.write_phase()
            if self._flops is not None:
                self._flops.enter_phase()

    @guarded
    def _leave_phase(self, error: BaseException | None) -> None:
        """Leave the innermost phase; ``error`` is the exception that passes through it."""
        if get_ident() == self._clock.thread:
            if error is not None and (self._failing is None or self._failing[0] != id(error)):
                self._failing = (id(error), self._clock.phase)
            if self._flops is not None:
                self._flops.leave_phase()
            self._clock.leave()
            self._status.write_phase()

    @guarded
    def name_group(self, group: ProcessGroup, axis: str) -> None:
        """Say which axis a process group is: ``data``, ``tensor``, ``pipeline``, ``world``.

        A group that is never named is ``world`` when it holds all ranks, else ``other``.
        """
        self._counter.name_group(group, axis)

    @guarded
    def watch_for_hangs(self, timeout_s: float) -> None:
        """Say, from now on, why collectives do not advance that take long.

        Args:
            timeout_s: How long one may take before it ends the run, seconds.
        """
        self._hangs = start_watch(
            self._file, self._clock, timeout_s=timeout_s, progress=self._status.progress
        )

    @guarded
    def explain(self, error: BaseException) -> None:
        """Put into the error by which a collective was given up what is known of its cause."""
        if self._hangs is not None:
            self._hangs.explain(error)

    @guarded
    def expect(self, traffic: Sequence[ExpectedTraffic]) -> None:
        """Set the expected traffic of one optimizer step on this rank."""
        self._file.write_facts({"expected": msgspec.to_builtins(list(traffic))})

    @guarded
    def expect_memory(self, kinds: Sequence[MemoryKind]) -> None:
        """Set the predicted memory of this rank, by kind and place."""
        self._file.write_facts({"expected_memory": msgspec.to_builtins(list(kinds))})

    @guarded
    def watch_memory(self, tensors: TensorsByKind) -> None:
        """Set the function that returns the tensors by kind; called every few seconds."""
        self._memory.watch(tensors)

    @guarded
    def compute(
        self,
        *,
        flops_per_batch: float | None,
        recomputed_flops_per_batch: float | None = None,
        peak_flops_per_second: float | None,
    ) -> None:
        """Set the FLOPs of one batch on this rank, and the peak of its device."""
        compute = {
            "flops_per_batch": flops_per_batch,
            "recomputed_flops_per_batch": recomputed_flops_per_batch,
            "peak_flops_per_second": peak_flops_per_second,
        }
        if compute != self._compute:
            self._compute = compute
            self._file.write_facts(compute)

    @guarded
    def count_flops(self) -> None:
        """Count the products of the batch that has begun, until ``counted_flops``."""
        self._flops = FlopCounter(self._clock)

    def counted_flops(self) -> BatchFlops | None:
        """Stop counting; return the count, None if nothing was counted."""
        counter, self._flops = self._flops, None
        return None if counter is None else counter.stop()

    @guarded
    def schedule(self, plan: PipelinePlan) -> None:
        """Say which schedule the pipeline follows; the same on all ranks."""
        if self._local_rank == 0:
            write_plan(plan, self.path)

    @guarded
    def tensor_plan(self, plan: TensorPlanTable) -> None:
        """Say how layers are divided over the tensor axis; the same on all ranks."""
        if self._local_rank == 0:
            write_tensor_plan(plan, self.path)

    @guarded
    def chunk(self, *, stage: int, microbatch: int, kind: str, start_ns: int, end_ns: int) -> None:
        """Record one microbatch in one stage, outside of validation.

        Args:
            stage: Stage of the model, counted over all ranks.
            microbatch: Microbatch of the step, from 0.
            kind: ``F``, ``B``, ``I`` or ``W``, see ``snapshot.Chunk``.
            start_ns: On the monotonic clock, when its computation began, what it waited for
                received.
            end_ns: When its computation ended, before anything is sent.
        """
        if self._clock.phase != VALIDATION:
            number, step = layout.CHUNK_KINDS.index(kind), self._status.global_step + 1
            self._file.span(step, stage, microbatch, number, 0, 0, start_ns, end_ns)

    @guarded
    def trend(self, name: str, value: float) -> None:
        """Say the newest value of a figure that is kept over the whole run."""
        self._steps.note(name, value)

    @guarded
    def chose(self, strategy: str) -> None:
        """Say which strategy one that chooses has taken."""
        self._file.write_facts({"chosen_strategy": strategy})

    @guarded
    def expert_rows(self, module: str, chosen: Tensor, num_experts: int) -> None:
        """Count rows by expert; of forward passes of training, those of a recomputation not again.

        Args:
            module: The name of the module whose experts they are.
            chosen: Numbers of experts, of any shape.
            num_experts: Experts of the module.
        """
        if self._clock.phase == FORWARD:
            self._experts.add(module, chosen, num_experts)

    @guarded
    def dropped_rows(self, module: str, count: Tensor) -> None:
        """Count rows that no expert of a module had a place for, in the same passes.

        Args:
            module: The name of the module.
            count: How many, on the device.
        """
        if self._clock.phase == FORWARD:
            self._experts.drop(module, count)

    @guarded
    def live_microbatches(self, peaks: Mapping[int, int]) -> None:
        """Say how many microbatches each stage has kept at once at most in a batch of training."""
        if any(most > self._live.get(stage, 0) for stage, most in peaks.items()):
            self._live = {
                stage: max(most, self._live.get(stage, 0)) for stage, most in peaks.items()
            }
            self._file.write_facts({"live_microbatches": sorted(self._live.items())})

    @guarded
    def offload(
        self,
        place: OffloadPlace,
        direction: OffloadDirection,
        num_bytes: int,
        seconds: float,
        *,
        is_alone: bool = False,
    ) -> None:
        """Count a transfer that has just ended; from any thread, a few times a step.

        Args:
            place: Source of a read, or target of a write.
            direction: ``read`` brings bytes back towards the device, ``write`` takes them away.
            num_bytes: Bytes that were moved.
            seconds: How long it took, up to now.
            is_alone: It ended earlier, and no other transfer went this way meanwhile.
        """
        self._offload.add(place, direction, num_bytes, seconds, is_alone=is_alone)

    @guarded
    def begin_loop(self, *, epoch: int, global_step: int) -> None:
        """Mark the start of the batches: earlier time is no part of the first step."""
        self._clock.restart(DATA)
        if self._timeline is not None:
            self._timeline.recycle(self._timeline.end_step(DATA))
        self._status.begin(epoch, global_step)
        self._status.write()

    @guarded
    def end_loop(self) -> None:
        """Say that no batch follows."""
        self._clock.rebase(OTHER)
        self._status.write()

    @guarded
    def begin_batch(self, *, index: int, epoch: int) -> None:
        """Mark the arrival of a batch; the time since ``end_batch`` was waiting for data."""
        status = self._status
        status.state = "running"
        status.batch_index = index
        status.epoch = epoch
        self._failing = None
        self._clock.rebase(OTHER)
        status.write_phase()

    @guarded
    def end_batch(
        self,
        *,
        global_step: int,
        loss: float | Tensor | None,
        samples: int | None,
        tokens: int | None,
    ) -> None:
        """Close the step: its time is that since the previous step was closed.

        Args:
            global_step: Lightning's counter of optimizer steps, after this batch.
            loss: Read later, so not to be changed in place; of a device, copied behind the step.
            samples: Items of the batch on this rank.
            tokens: Tokens of the batch on this rank.
        """
        self._clock.rebase(DATA)
        status = self._status
        status.global_step = global_step
        self._file.newest_step(global_step)
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss = loss.detach()  # a step that waits must not keep its graph
        host_time = self._clock.take()
        step = EndedStep(
            status.batch_index,
            global_step,
            status.epoch,
            time.time(),
            host_time,
            loss,
            samples,
            tokens,
        )
        self._steps.add(step, self._clock.since_ns, DATA)
        self._counter.step += 1
        self._offload.after_step(global_step)
        self._experts.after_step()
        self._memory.after_step(self._clock.since_ns, is_updated=global_step > status.start_step)
        status.write_phase()
        if self._nodes is not None:
            self._nodes.after_step()

    @guarded
    def metrics(self, global_step: int, values: Mapping[str, float | Tensor]) -> None:
        """Add values to the series of their names; tensors on a device arrive steps later."""
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.numel() == 1:
                self._steps.add_metric(name, global_step, value)

    @guarded
    def event(self, kind: str, message: str) -> None:
        """Note a line for a human; of a checkpoint the message is its path."""
        if kind == "checkpoint":
            # A path may hold bytes that are no text, and be longer than the facts have room for.
            message = redact_text(encodable(message))[:MAX_PATH]
            self._file.write_facts({"checkpoint": message})
        self._file.event(kind, message)

    def rank_died(self, rank: int, exit_code: int | None) -> None:
        """Note how another rank of this host died, for the supervisor in this process."""
        record_end(self.path, rank=rank, exit_code=exit_code)

    def finish(self) -> None:
        """Say that this rank ended well. The first of ``finish`` and ``fail`` counts."""
        self._end("finished", self._clock.phase, "end", "finished")

    def fail(self, error: BaseException) -> None:
        """Say that this rank ended with an exception, in the phase that it came from."""
        phase = self._clock.phase
        if self._failing is not None and self._failing[0] == id(error):
            phase = self._failing[1]
        said = ""
        with contextlib.suppress(Exception):  # a user's exception may fail to say what it is
            said = str(error)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        self._end("failed", phase, "error", text)

    def _end(self, state: str, phase: int, kind: str, message: str) -> None:
        """Write the end of the rank; also when telemetry is off, or it would look dead."""
        self.counted_flops()  # an error may have left its phase entered
        if self._status.has_ended:
            return
        self._status.end(state)
        try:
            self._file.phase(phase)
            self._offload.write(self._status.global_step)
            self._status.write()
            self._file.event(kind, message)
            self._steps.flush()
            if state == "finished":  # the counts of a device that has failed cannot be read
                self._experts.write()
        except Exception as failure:  # noqa: BLE001 - telemetry never stops training
            self.turn_off(failure)
        if self._nodes is not None:
            # A rank that has lost a peer may have lost the store with it, and must not wait for it.
            self._nodes.end(is_heard=state == "finished" or not is_consequence(message))

    def close(self) -> None:
        """Stop counting and let go of the file; without ``fail`` before, the rank ended well."""
        if self._hangs is not None:
            self._hangs.stop()
        self.finish()
        self.is_on = False
        with contextlib.suppress(Exception):  # the run is over, and ends as it would without us
            self._counter.remove()
        self._file.close()

    def turn_off(self, error: Exception) -> None:
        """Stop recording after a failure of telemetry itself; warn once."""
        if self.is_on:
            self.is_on = False
            self._counter.stop()
            self.counted_flops()
            with contextlib.suppress(Exception):
                self._file.event("warning", f"telemetry is off: {type(error).__name__}: {error}")
            warn_off(error)
