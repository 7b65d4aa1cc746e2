"""Holds steps until they are due, or their times and loss have come from the device."""

from collections import deque
from typing import Final, NamedTuple

import torch
from torch import Tensor

from boltmesh.telemetry import layout
from boltmesh.telemetry.stall import whole_steps
from boltmesh.telemetry.writer.device import CudaTimeline, DeviceLoad, ScalarMailbox, StepMarks
from boltmesh.telemetry.writer.memory import MemorySampler
from boltmesh.telemetry.writer.phases import CHECKPOINT, VALIDATION, StepTime
from boltmesh.telemetry.writer.rank_file import RankFile

WRITE_EVERY_NS: Final = 50_000_000
"""Steps on the host are written together once this has passed: what runs once between the
kernels of a model runs on a cold cache, and costs several times what it costs in a loop."""

READ_AFTER_STEPS: Final = 2
"""A step on a device is read once this many further steps were launched, and has passed."""

MAX_UNREAD_STEPS: Final = 16
"""Steps that may wait for a device; the oldest is then written with the host's times."""

LOSS_EVERY_STEPS: Final = 8
"""The ring of steps has every loss of late; the series that spans the run needs fewer."""


class EndedStep(NamedTuple):
    """A step that has ended on the host."""

    batch_index: int
    global_step: int
    epoch: int
    wall_s: float
    host_time: StepTime
    loss: float | Tensor | None
    samples: int | None
    tokens: int | None


class _Waiting(NamedTuple):
    """A step that the device may not have come to the end of."""

    step: EndedStep
    marks: StepMarks
    loss_slot: int | None
    metrics: list[tuple[str, int, int]]
    """Name, global step and slot."""


class _Accumulation:
    """Counts the batches of an optimizer step, by the steps that ended since the last call."""

    def __init__(self) -> None:
        self._global_step: int | None = None
        self._num_batches: int | None = None
        """Since the end of a step; None before the first end that is seen."""
        self._whole = (0, 0)
        """Batches and steps up to the newest end."""
        self._mean: float | None = None

    def add(self, global_step: int) -> None:
        """Count a batch, and the optimizer's step after it."""
        is_end = self._global_step is not None and global_step > self._global_step
        self._global_step = global_step
        if self._num_batches is not None:
            self._num_batches += 1
            if is_end:
                self._whole = (self._num_batches, self._whole[1] + 1)
        elif is_end:
            self._num_batches = 0

    def batches_per_step(self) -> float | None:
        """Return the mean; the last one if no step has ended since; None before the first."""
        batches, steps = self._whole
        if steps:
            assert self._num_batches is not None
            self._mean = batches / steps
            self._num_batches -= batches
            self._whole = (0, 0)
        return self._mean


class StepQueue:
    """Writes steps: a few at a time on the host, behind the device where there is one.

    Args:
        file: Where steps and metrics go.
        timeline: The device's marks; None on the host.
        memory: Totals of the rank's memory.
        load: Reads that of the rank's device.
    """

    def __init__(
        self,
        file: RankFile,
        timeline: CudaTimeline | None,
        memory: MemorySampler,
        load: DeviceLoad,
    ) -> None:
        self._file = file
        self._timeline = timeline
        self._mailbox = ScalarMailbox() if timeline is not None else None
        self._ended: list[EndedStep] = []
        self._written_ns = 0
        self._waiting: deque[_Waiting] = deque()
        self._metrics: list[tuple[str, int, int]] = []
        self._memory = memory
        self._load = load
        self._ordinary: list[tuple[int, int | None]] = []
        """Nanoseconds and tokens of ordinary batches since the last mean."""
        self._accumulation = _Accumulation()
        self._num_batches = 0
        """Since the last mean."""
        self._due = LOSS_EVERY_STEPS
        """Batches of the next mean."""
        self._noted: dict[str, float] = {}
        """The newest values of trends that others measure."""
        self._sent: tuple[float, int] | None = None
        """Wall clock and payload bytes at the last mean."""

    def note(self, name: str, value: float) -> None:
        """Add a value to the next point of a trend; of several the newest is taken."""
        self._noted[name] = value

    def add_metric(self, name: str, global_step: int, value: float | Tensor) -> None:
        """Write a metric, with the step that is being made if it is on the device."""
        if self._mailbox is not None and isinstance(value, Tensor) and value.is_cuda:
            self._metrics.append((name, global_step, self._mailbox.send(value)))
        elif (number := _number(value)) is not None:
            self._file.point(name, global_step, number)

    def add(self, step: EndedStep, now_ns: int, next_phase: int) -> None:
        """Take a step that has ended, and write those that are due."""
        if self._timeline is None:
            self._ended.append(step)
            if now_ns - self._written_ns >= WRITE_EVERY_NS:
                self._written_ns = now_ns
                self.write_ended()
            return
        assert self._mailbox is not None
        slot = None
        if isinstance(step.loss, Tensor) and step.loss.is_cuda:
            slot = self._mailbox.send(step.loss)
            step = step._replace(loss=None)
        marks = self._timeline.end_step(next_phase)
        self._waiting.append(_Waiting(step, marks, slot, self._metrics))
        self._metrics = []
        while len(self._waiting) > READ_AFTER_STEPS and self._write_oldest(
            is_forced=len(self._waiting) > MAX_UNREAD_STEPS
        ):
            pass

    def flush(self) -> None:
        """Write all steps: those that the device has not passed with the host's times."""
        self.write_ended()
        while self._waiting:
            self._write_oldest(is_forced=True)

    def write_ended(self) -> None:
        """Write the steps that have ended on the host, however few."""
        ended, self._ended = self._ended, []
        for step in ended:
            self._write(step, step.host_time, _number(step.loss))

    def _write_oldest(self, *, is_forced: bool) -> bool:
        step, marks, slot, metrics = self._waiting[0]
        assert self._timeline is not None
        assert self._mailbox is not None
        if not marks.has_passed():
            if is_forced:
                self._waiting.popleft()
                self._write(step, step.host_time, _number(step.loss))
            return is_forced
        self._waiting.popleft()
        for name, global_step, metric_slot in metrics:
            self._file.point(name, global_step, self._mailbox.read(metric_slot))
        loss = _number(step.loss) if slot is None else self._mailbox.read(slot)
        self._write(step, marks.read(), loss)
        self._timeline.recycle(marks)
        return True

    def _write(self, step: EndedStep, time: StepTime, loss: float | None) -> None:
        sequence = self._file.step(
            step.batch_index,
            step.global_step,
            step.epoch,
            0 if loss is None else layout.STEP_HAS_LOSS,
            step.wall_s,
            time.total_ns,
            *time.phases_ns,
            0.0 if loss is None else loss,
            layout.UNKNOWN if step.samples is None else step.samples,
            layout.UNKNOWN if step.tokens is None else step.tokens,
        )
        if loss is not None and sequence % LOSS_EVERY_STEPS == 1:
            self._file.point("loss", step.global_step, loss)
        self._add_trends(step, time)

    def _add_trends(self, step: EndedStep, time: StepTime) -> None:
        """Add means of the last steps to the series of the run, ordinary batches alone."""
        self._accumulation.add(step.global_step)
        self._num_batches += 1
        if not (time.phases_ns[VALIDATION] or time.phases_ns[CHECKPOINT]):
            self._ordinary.append((time.total_ns, step.tokens))
        if self._num_batches < self._due or not self._ordinary:
            return
        num_batches, self._num_batches = self._num_batches, 0
        ordinary, self._ordinary = self._ordinary, []
        seconds = sum(total_ns for total_ns, _ in ordinary) / 1e9
        values: dict[str, float] = {}
        if (batches := self._accumulation.batches_per_step()) is not None:
            self._due = whole_steps(LOSS_EVERY_STEPS, max(1, round(batches)))
            if batches <= num_batches:
                values["step_s"] = batches * seconds / len(ordinary)
        tokens = [number for _, number in ordinary if number is not None]
        if len(tokens) == len(ordinary) and seconds > 0:
            values["tokens_per_s"] = sum(tokens) / seconds
        rss, _, reserved, _ = self._memory.totals
        used = rss if reserved == layout.UNKNOWN else reserved
        if used != layout.UNKNOWN:
            values["memory_bytes"] = used
        sent, self._sent = self._sent, (step.wall_s, self._file.payload_bytes)
        if sent is not None and step.wall_s > sent[0]:
            values["bytes_per_s"] = (self._sent[1] - sent[1]) / (step.wall_s - sent[0])
        values |= {"wall_s": step.wall_s} | self._load.read() | self._noted
        self._noted.clear()
        for name, value in values.items():
            self._file.point(layout.TREND + name, step.global_step, value)


def _number(value: float | Tensor | None) -> float | None:
    """Return a value on the host, the mean of a tensor; None for other devices."""
    if not isinstance(value, Tensor):
        return None if value is None else float(value)
    if not value.is_cpu:
        return None
    return float((value.to(torch.float64).mean() if value.ndim else value).item())
