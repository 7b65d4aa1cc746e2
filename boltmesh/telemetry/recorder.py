"""What the engine and the Lightning callback tell of a running rank.

A ``Recorder`` writes the rank's telemetry file; a ``NullRecorder`` takes the same calls and does
nothing. ``open_recorder`` returns the one or the other. Whatever goes wrong inside a recorder
turns it off with one warning: training does not notice.
"""

import functools
import os
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec

import msgspec
import psutil
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from boltmesh.telemetry import device as devices
from boltmesh.telemetry import layout
from boltmesh.telemetry.communication import CommunicationCounter
from boltmesh.telemetry.job import (
    SWITCH_VARIABLE,
    JobInfo,
    job_path,
    make_private_folder,
    record_end,
    run_dir,
    write_job,
)
from boltmesh.telemetry.phases import DATA, OTHER, PhaseClock, StepTime
from boltmesh.telemetry.snapshot import PHASES
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.telemetry.writer import RankFile, rank_file

MEMORY_EVERY_NS: Final = 500_000_000
READ_AFTER_STEPS: Final = 2
"""A device's step is read once this many further steps were launched, and has passed."""

MAX_UNREAD_STEPS: Final = 16
"""Steps that may wait for a device; the oldest is then written with the host's times."""

P = ParamSpec("P")


def is_switched_off() -> bool:
    """Tell whether the environment turns telemetry off."""
    return os.environ.get(SWITCH_VARIABLE, "").strip().lower() in {"0", "false", "off", "no"}


def open_recorder(
    job: JobInfo,
    *,
    rank: int,
    local_rank: int,
    device: torch.device,
    coordinates: dict[str, int],
) -> "Recorder | NullRecorder":
    """Open this rank's recorder. Never raises: what prevents it is said in one warning."""
    if is_switched_off():
        return NullRecorder()
    try:
        return Recorder.open(
            job, rank=rank, local_rank=local_rank, device=device, coordinates=coordinates
        )
    except Exception as error:  # noqa: BLE001 - telemetry never stops training
        _warn(error)
        return NullRecorder()


def _warn(error: Exception) -> None:
    text = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
    warnings.warn(
        f"boltmesh telemetry is off for this process: {text}", RuntimeWarning, stacklevel=3
    )


def _guarded(
    method: Callable[Concatenate["Recorder", P], None],
) -> Callable[Concatenate["Recorder", P], None]:
    """Make a method do nothing once telemetry is off, and turn it off when it fails."""

    @functools.wraps(method)
    def call(self: "Recorder", *args: P.args, **kwargs: P.kwargs) -> None:
        if self.is_on:
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - telemetry never stops training
                self.turn_off(error)

    return call


class NullRecorder:
    """Takes what a ``Recorder`` takes, and does nothing."""

    is_on = False
    path: Path | None = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """See ``Recorder``."""
        return nullcontext()

    def name_group(self, group: ProcessGroup, axis: str) -> None:
        """See ``Recorder``."""

    def expect(self, traffic: Sequence[ExpectedTraffic]) -> None:
        """See ``Recorder``."""

    def begin_loop(self) -> None:
        """See ``Recorder``."""

    def begin_batch(self, *, index: int, epoch: int) -> None:
        """See ``Recorder``."""

    def end_batch(
        self,
        *,
        global_step: int,
        loss: float | Tensor | None,
        samples: int | None,
        tokens: int | None,
    ) -> None:
        """See ``Recorder``."""

    def metrics(self, global_step: int, values: Mapping[str, float | Tensor]) -> None:
        """See ``Recorder``."""

    def event(self, kind: str, message: str) -> None:
        """See ``Recorder``."""

    def rank_died(self, rank: int, exit_code: int) -> None:
        """See ``Recorder``."""

    def finish(self) -> None:
        """See ``Recorder``."""

    def fail(self, error: BaseException) -> None:
        """See ``Recorder``."""

    def close(self) -> None:
        """See ``Recorder``."""


class _Step(NamedTuple):
    """A step whose times or loss are still on the device."""

    fields: tuple[int, int, int, float]
    """Batch index, global step, epoch, wall clock at its end."""
    host_time: StepTime
    loss: float | None
    loss_slot: int | None
    samples: int | None
    tokens: int | None
    marks: "devices.StepMarks | None"
    metrics: list[tuple[str, int, int]]
    """Name, global step and slot of values that travel with this step."""


class _Phase:
    """One phase as a context; holds nothing of its own, so one object serves every use."""

    __slots__ = ("_index", "_recorder")

    def __init__(self, recorder: "Recorder", index: int) -> None:
        self._recorder = recorder
        self._index = index

    def __enter__(self) -> None:
        self._recorder.enter_phase(self._index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recorder.leave_phase(error)


class Recorder:
    """Writes what one rank does, from the start of its process group to the end of the run.

    Not for direct construction: ``open_recorder`` or ``Recorder.open``. All methods but
    ``rank_died`` belong to the thread that trains.
    """

    def __init__(self, file: RankFile, *, device: torch.device) -> None:
        self.is_on = True
        self.path = file.path.parent
        self.last_checkpoint: str | None = None
        self._file = file
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._timeline = devices.CudaTimeline(OTHER) if self._is_cuda else None
        self._mailbox = devices.ScalarMailbox() if self._is_cuda else None
        self._clock = PhaseClock(self._timeline)
        self._counter = CommunicationCounter(
            file, self._clock, is_on_device=self._is_cuda, on_error=self.turn_off
        )
        self._counter.step = file.num_steps + 1
        self._phases = {name: _Phase(self, index) for index, name in enumerate(PHASES)}
        self._unread: deque[_Step] = deque()
        self._travelling: list[tuple[str, int, int]] = []
        self._state = "starting"
        self._epoch = 0
        self._global_step = 0
        self._index = 0
        self._process = psutil.Process()
        self._memory = (layout.UNKNOWN,) * 4
        self._memory_ns = 0
        self._failing: tuple[int, int] | None = None

    @classmethod
    def open(
        cls,
        job: JobInfo,
        *,
        rank: int,
        local_rank: int,
        device: torch.device,
        coordinates: dict[str, int],
    ) -> "Recorder":
        """Create this rank's file in the job's folder and begin to count collectives.

        Raises:
            TelemetryError: The folder or the file cannot be had.
            OSError: As the system says it.
        """
        make_private_folder(run_dir())
        path = job_path(job.id)
        make_private_folder(path)
        file = RankFile(rank_file(path, rank), rank=rank, world_size=job.world_size)
        try:
            if local_rank == 0:
                write_job(job, path)
            recorder = cls(file, device=device)
            note = recorder._counter.start()  # noqa: SLF001 - its own
            file.write_facts(
                {
                    "host": socket.gethostname(),
                    "device": devices.describe(device),
                    "device_uuid": devices.uuid(device),
                    "coordinates": coordinates,
                    "communication_note": note,
                    "expected": [],
                }
            )
            recorder._sample_memory()  # noqa: SLF001
            recorder._write_status()  # noqa: SLF001
            file.event("start", f"rank {rank} of {job.world_size} on {devices.describe(device)}")
        except BaseException:
            file.close()
            raise
        if note is not None:
            file.event("warning", note)
        return recorder

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which time belongs to ``name``, one of PHASES.

        Phases nest and are exclusive: the outer one pauses. See [Note: What is exposed
        communication] in ``phases.py``.
        """
        return self._phases[name]

    def enter_phase(self, index: int) -> None:
        """Enter a phase by its index; ``leave_phase`` has to follow."""
        if self.is_on and self._clock.is_own_thread:
            try:
                self._clock.enter(index)
                self._write_status()
            except Exception as error:  # noqa: BLE001 - telemetry never stops training
                self.turn_off(error)

    def leave_phase(self, error: BaseException | None = None) -> None:
        """Leave the innermost phase; ``error`` is what passes through it."""
        if self.is_on and self._clock.is_own_thread:
            try:
                if error is not None and (self._failing is None or self._failing[0] != id(error)):
                    self._failing = (id(error), self._clock.phase)
                self._clock.leave()
                self._write_status()
            except Exception as failure:  # noqa: BLE001 - telemetry never stops training
                self.turn_off(failure)

    @_guarded
    def name_group(self, group: ProcessGroup, axis: str) -> None:
        """Say which axis a process group is: ``data``, ``tensor``, ``pipeline``, ``world``.

        A group that is never named is ``world`` when it holds all ranks, else ``other``.
        """
        self._counter.name_group(group, axis)

    @_guarded
    def expect(self, traffic: Sequence[ExpectedTraffic]) -> None:
        """Say what one optimizer step should move on this rank."""
        self._file.write_facts({"expected": msgspec.to_builtins(list(traffic))})

    @_guarded
    def begin_loop(self) -> None:
        """Say that batches follow: what was before is no part of the first step."""
        self._clock.restart()
        self._clock.rebase(DATA)
        self._clock.take()
        if self._timeline is not None:
            self._timeline.recycle(self._timeline.end_step(DATA))
        self._state = "running"
        self._write_status()

    @_guarded
    def begin_batch(self, *, index: int, epoch: int) -> None:
        """Say that the batch is there; what passed since ``end_batch`` was waiting for data."""
        self._state = "running"
        self._index = index
        self._epoch = epoch
        self._failing = None
        self._clock.rebase(OTHER)
        self._write_status()

    @_guarded
    def end_batch(
        self,
        *,
        global_step: int,
        loss: float | Tensor | None,
        samples: int | None,
        tokens: int | None,
    ) -> None:
        """Close the step: its time is what passed since the step before was closed.

        Args:
            global_step: Lightning's counter of optimizer steps, after this batch.
            loss: A tensor on a device is copied behind the step and read later.
            samples: Items of the batch on this rank.
            tokens: Tokens of the batch on this rank.
        """
        self._clock.rebase(DATA)
        time_ns = self._clock.take()
        self._global_step = global_step
        slot = None
        if isinstance(loss, Tensor):
            loss, slot = self._fetch(loss)
        marks = self._timeline.end_step(DATA) if self._timeline is not None else None
        metrics, self._travelling = self._travelling, []
        fields = (self._index, global_step, self._epoch, time.time())
        self._unread.append(_Step(fields, time_ns, loss, slot, samples, tokens, marks, metrics))
        self._counter.step += 1
        self._write_steps()
        now = time.monotonic_ns()
        if now - self._memory_ns >= MEMORY_EVERY_NS:
            self._memory_ns = now
            self._sample_memory()
            self._file.touch()
        self._write_status()

    @_guarded
    def metrics(self, global_step: int, values: Mapping[str, float | Tensor]) -> None:
        """Add values to the series of their names; tensors on a device arrive steps later."""
        for name, value in values.items():
            if not isinstance(value, Tensor):
                self._file.point(name, global_step, float(value))
            elif value.numel() == 1:
                number, slot = self._fetch(value)
                if number is not None:
                    self._file.point(name, global_step, number)
                elif slot is not None:
                    self._travelling.append((name, global_step, slot))

    @_guarded
    def event(self, kind: str, message: str) -> None:
        """Note a line for a human; of a checkpoint the message is its path."""
        if kind == "checkpoint":
            self.last_checkpoint = message
        self._file.event(kind, message)

    def rank_died(self, rank: int, exit_code: int) -> None:
        """Note how another rank of this host died, for the supervisor in this process."""
        record_end(self.path, rank=rank, exit_code=exit_code)

    @_guarded
    def finish(self) -> None:
        """Say that this rank ended well. The first of ``finish`` and ``fail`` counts."""
        if self._state not in {"finished", "failed"}:
            self._write_steps(is_last=True)
            self._state = "finished"
            self._write_status()
            self._file.event("end", "finished")

    @_guarded
    def fail(self, error: BaseException) -> None:
        """Say that this rank ended with an exception, in the phase that it came from."""
        if self._state in {"finished", "failed"}:
            return
        phase = self._clock.phase
        if self._failing is not None and self._failing[0] == id(error):
            phase = self._failing[1]
        self._write_steps(is_last=True)
        self._state = "failed"
        self._write_status(phase)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        self._file.event("error", text)

    def close(self) -> None:
        """Stop counting and let go of the file; without ``fail`` before, the rank ended well."""
        self.finish()
        self.is_on = False
        self._counter.remove()
        self._file.close()

    def turn_off(self, error: Exception) -> None:
        """Stop recording after a failure of telemetry itself; warn once."""
        if self.is_on:
            self.is_on = False
            self._counter.stop()
            _warn(error)

    def _fetch(self, value: Tensor) -> tuple[float | None, int | None]:
        """Read a scalar on the host, or send it on its way from the device."""
        if value.is_cpu:
            value = value.detach()
            return float(value if value.numel() == 1 else value.float().mean()), None
        if self._mailbox is not None and value.is_cuda:
            return None, self._mailbox.send(value)
        return None, None

    def _write_steps(self, *, is_last: bool = False) -> None:
        """Write the steps that are known by now, in their order."""
        while self._unread:
            step = self._unread[0]
            has_passed = step.marks is None
            if step.marks is not None:
                is_old_enough = is_last or len(self._unread) > READ_AFTER_STEPS
                has_passed = is_old_enough and step.marks.has_passed()
                if not has_passed and not is_last and len(self._unread) <= MAX_UNREAD_STEPS:
                    return
            self._unread.popleft()
            self._write_step(step, has_passed=has_passed)

    def _write_step(self, step: _Step, *, has_passed: bool) -> None:
        times, loss = step.host_time, step.loss
        if step.marks is not None and self._timeline is not None and has_passed:
            times = step.marks.read()
            self._timeline.recycle(step.marks)
        if has_passed and self._mailbox is not None:
            if step.loss_slot is not None:
                loss = self._mailbox.read(step.loss_slot)
            for name, global_step, slot in step.metrics:
                self._file.point(name, global_step, self._mailbox.read(slot))
        index, global_step, epoch, wall_s = step.fields
        self._file.step(
            index,
            global_step,
            epoch,
            0 if loss is None else layout.STEP_HAS_LOSS,
            wall_s,
            times.total_ns,
            *times.phases_ns,
            0.0 if loss is None else loss,
            layout.UNKNOWN if step.samples is None else step.samples,
            layout.UNKNOWN if step.tokens is None else step.tokens,
        )
        if loss is not None:
            self._file.point("loss", global_step, loss)

    def _sample_memory(self) -> None:
        on_device = devices.memory(self._device)
        self._memory = (
            self._process.memory_info().rss,
            *(layout.UNKNOWN if each is None else each for each in on_device),
        )

    def _write_status(self, phase: int | None = None) -> None:
        self._file.status(
            layout.STATES.index(self._state),
            self._clock.phase if phase is None else phase,
            0,
            self._epoch,
            self._global_step,
            self._index,
            self._counter.step,
            time.time(),
            *self._memory,
        )
