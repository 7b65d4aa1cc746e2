"""Copies that overlap with computation, on streams of their own where the device has streams.

``DeviceCopy`` copies from host memory to the compute device before the value is used. ``CopyMeter``
measures copies between the host and an accelerator without waiting for them.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from boltmesh.strategies.offload.host_memory import RangeAllocator, round_up
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder


class CopyMeter:
    """Records size and time of the copies on one stream once they are found to be done."""

    def __init__(self, device: torch.device, recorder: Recorder | NullRecorder) -> None:
        self._device = device
        self._recorder = recorder
        self._copies: deque[tuple[Literal["read", "write"], int, torch.Event, torch.Event]] = (
            deque()
        )
        self._lock = Lock()

    @contextmanager
    def copy(self, direction: Literal["read", "write"], num_bytes: int) -> Iterator[None]:
        """Context for copies submitted to the current stream; ``read`` is from the host."""
        if self._device.type == "cpu" or not self._recorder.is_on:
            yield
            return
        self.report()
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        with self._lock:
            self._copies.append((direction, num_bytes, begin, end))

    def report(self) -> None:
        """Record the copies that are done; copies of one stream end in order."""
        with self._lock:
            while self._copies and self._copies[0][3].query():
                direction, num_bytes, begin, end = self._copies.popleft()
                seconds = begin.elapsed_time(end) / 1e3
                self._recorder.offload("host", direction, num_bytes, seconds, is_alone=True)

    def _event(self) -> torch.Event:
        return torch.Event(self._device, enable_timing=True)


class CopyStream:
    """A stream for copies; does nothing on the CPU, where copies run in order."""

    def __init__(
        self, device: torch.device, recorder: Recorder | NullRecorder | None = None
    ) -> None:
        self.meter = CopyMeter(device, recorder or NullRecorder())
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    @contextmanager
    def after(self, *events: torch.Event | None) -> Iterator[None]:
        """Context for work on this stream that begins once ``events`` have passed."""
        if self._stream is None:
            yield
            return
        for event in events:
            if event is not None:
                self._stream.wait_event(event)
        with self._stream:
            yield

    def synchronize(self) -> None:
        """Return when all submitted work is done."""
        if self._stream is not None:
            self._stream.synchronize()
            self.meter.report()


def wait_on_stream(device: torch.device, event: torch.Event | None) -> None:
    """Make the work submitted to the current stream from now on wait for ``event``."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)


ALIGNMENT_BYTES = 512
"""Alignment of the parts of a ring, as of torch's allocator: kernels read them at full speed."""


class DeviceRing:
    """Device memory of a fixed size for copies.

    The host runs ahead of the device. A part may be returned again while the device still reads it,
    together with the events of these reads: a copy into the part waits for them on its stream, and
    the host does not wait.

    Args:
        memory: ``uint8``, contiguous, shape ``(num_bytes,)``.
    """

    def __init__(self, memory: Tensor) -> None:
        self._ranges = RangeAllocator(memory)
        self._start = memory.data_ptr()
        self._reads: list[tuple[int, int, torch.Event]] = []

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self._ranges.num_bytes

    def take(self, num_bytes: int) -> tuple[Tensor, list[torch.Event]] | None:
        """Return a part of at least this size, and the events that a copy into it waits for.

        The part is ``uint8`` of shape ``(aligned(num_bytes),)``; None where no part is free.
        """
        part = self._ranges.take(aligned(num_bytes))
        if part is None:
            return None
        start = part.data_ptr() - self._start
        stop = start + part.numel()
        self._reads = [each for each in self._reads if not each[2].query()]
        return part, [event for first, last, event in self._reads if first < stop and start < last]

    def give_back(self, part: Tensor, read: torch.Event | None) -> None:
        """Free a part of ``take``; ``read`` passes when the device has finished reading it."""
        self._ranges.give_back(part)
        start = part.data_ptr() - self._start
        if read is not None:
            self._reads.append((start, start + part.numel(), read))


def aligned(num_bytes: int) -> int:
    """Return the bytes that a part of this size occupies in a ring."""
    return round_up(max(1, num_bytes), ALIGNMENT_BYTES)


class DeviceCopy:
    """A value that is being copied to the device; on the CPU it is not copied."""

    def __init__(self, host: Tensor, stream: torch.Stream | None) -> None:
        self._arrived: torch.Event | None = None
        self._value: Tensor | None = host
        if stream is not None:
            accelerator = torch.get_device_module(stream.device)
            with accelerator.device(stream.device), accelerator.stream(stream):
                self._value = host.to(stream.device, non_blocking=True)
                self._arrived = stream.record_event()

    @property
    def has_value(self) -> bool:
        """Whether ``drop`` has not been called yet."""
        return self._value is not None

    @property
    def num_device_bytes(self) -> int:
        """Bytes of accelerator memory in use."""
        if self._value is None or self._arrived is None:
            return 0
        return self._value.numel() * self._value.element_size()

    @property
    def is_host_free(self) -> bool:
        """Whether the host memory may be overwritten as far as this copy is concerned."""
        return self._arrived is None or self._arrived.query()

    def wait_for_host(self) -> None:
        """Return once the host memory may be overwritten."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def value(self) -> Tensor:
        """Return the value for work on the current stream, in the shape and dtype of ``host``."""
        assert self._value is not None
        if self._arrived is not None:
            stream = torch.get_device_module(self._value.device).current_stream()
            stream.wait_event(self._arrived)
            # ``drop`` returns its memory to the allocator, perhaps before the work submitted to
            # this stream has begun.
            self._value.record_stream(stream)
        return self._value

    def drop(self) -> None:
        """Free the device memory; ``is_host_free`` still reports on the host memory."""
        self._value = None


def copy_stream(device: torch.device) -> torch.Stream | None:
    """Return a stream for ``DeviceCopy``; None where the compute device is the host."""
    return None if device.type == "cpu" else torch.get_device_module(device).Stream(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[torch.Stream | None]:
    """Submit the kernels of the calling thread to its own stream; None on the CPU.

    Each thread begins with the stream of training: its work and the computation would wait for
    each other.
    """
    if device.type == "cpu":
        yield None
        return
    stream = torch.Stream(device)
    with stream:
        yield stream


def use_device(device: torch.device) -> None:
    """Make a thread use this process's device: each begins with the first one of the machine."""
    if device.type != "cpu" and device.index is not None:
        torch.get_device_module(device).set_device(device)
