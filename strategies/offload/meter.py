"""Measures copies between the host and an accelerator, without ever waiting for one."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Literal

import torch

from boltmesh.telemetry.recording.recorder import NullRecorder, Recorder


class CopyMeter:
    """Tells the recorder what the copies on one stream moved, once they are found to be done.

    Args:
        device: What the stream is of. On the CPU nothing is copied, and nothing is measured.
        recorder: Is told.
    """

    def __init__(self, device: torch.device, recorder: Recorder | NullRecorder) -> None:
        self._device = device
        self._recorder = recorder
        self._copies: deque[tuple[Literal["read", "write"], int, torch.Event, torch.Event]] = (
            deque()
        )
        self._lock = Lock()

    @contextmanager
    def copy(self, direction: Literal["read", "write"], num_bytes: int) -> Iterator[None]:
        """Around copies that are submitted to the current stream; ``read`` is from the host."""
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
        """Tell of the copies that are done; those of one stream end in their order."""
        with self._lock:
            while self._copies and self._copies[0][3].query():
                direction, num_bytes, begin, end = self._copies.popleft()
                seconds = begin.elapsed_time(end) / 1e3
                self._recorder.offload("host", direction, num_bytes, seconds, is_alone=True)

    def _event(self) -> torch.Event:
        return torch.Event(self._device, enable_timing=True)
