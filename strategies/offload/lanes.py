"""Copies beside the computation: a stream of their own, where the device has streams."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from boltmesh.strategies.offload.meter import CopyMeter
from boltmesh.telemetry.recording.recorder import NullRecorder, Recorder


class CopyLane:
    """A stream for copies. On the CPU, where everything is done in turn, it is nothing.

    Args:
        device: What is copied to and from.
        recorder: Is told of copies that ``meter`` is asked to measure.
    """

    def __init__(
        self, device: torch.device, recorder: Recorder | NullRecorder | None = None
    ) -> None:
        self.meter = CopyMeter(device, recorder or NullRecorder())
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    @contextmanager
    def after(self, *events: torch.Event | None) -> Iterator[None]:
        """Submit work that begins once ``events`` have passed."""
        if self._stream is None:
            yield
            return
        for event in events:
            if event is not None:
                self._stream.wait_event(event)
        with self._stream:
            yield

    def synchronize(self) -> None:
        """Return when all that was submitted is done."""
        if self._stream is not None:
            self._stream.synchronize()
            self.meter.report()


def event_on_stream(device: torch.device) -> torch.Event | None:
    """An event that passes when what was submitted so far to the current stream is done."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def wait_on_stream(device: torch.device, event: torch.Event | None) -> None:
    """Let what is submitted to the current stream from now on wait for ``event``."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)
