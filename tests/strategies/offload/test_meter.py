"""Copies are told of once they are done, in their order, and nobody waits for that."""

from collections import deque

import pytest
import torch

from boltmesh.strategies.offload.streams import CopyMeter
from boltmesh.telemetry.writer.null_recorder import NullRecorder


class Listener(NullRecorder):
    """Keeps what it is told."""

    is_on = True

    def __init__(self):
        self.told = []

    def offload(self, place, direction, num_bytes, seconds, *, is_alone=False):
        self.told.append((place, direction, num_bytes, seconds, is_alone))


class Device:
    """A stream whose clock is moved by hand, in milliseconds."""

    def __init__(self):
        self.events = []
        self.done_until = 0.0

    def make_event(self):
        event = Event(self, float(len(self.events)))
        self.events.append(event)
        return event


class Event:
    """Passes at a moment of the device's clock."""

    def __init__(self, device, at):
        self.device, self.at, self.is_recorded = device, at, False

    def record(self):
        self.is_recorded = True

    def query(self):
        return self.is_recorded and self.device.done_until >= self.at

    def elapsed_time(self, end):
        assert self.query()
        assert end.query()
        return end.at - self.at


@pytest.fixture
def stream():
    device, listener = Device(), Listener()
    meter = CopyMeter(torch.device("cuda"), listener)
    meter._event = device.make_event
    return device, meter, listener


def test_a_copy_is_told_of_when_it_is_done_and_not_before(stream):
    device, meter, listener = stream
    for direction, num_bytes in (("write", 100), ("read", 200), ("write", 300)):
        with meter.copy(direction, num_bytes):
            pass
    assert listener.told == []
    device.done_until = 3.0  # the first two of the three have ended
    meter.report()
    assert listener.told == [
        ("host", "write", 100, 0.001, True),
        ("host", "read", 200, 0.001, True),
    ]
    device.done_until = 9.0
    with meter.copy("read", 400):
        pass
    assert [each[2] for each in listener.told] == [100, 200, 300]


@pytest.mark.parametrize("is_on", [True, False])
def test_nothing_is_measured_on_the_cpu_or_for_nobody(is_on):
    listener = Listener()
    listener.is_on = is_on
    meter = CopyMeter(torch.device("cpu" if is_on else "cuda"), listener)
    meter._event = deque().popleft  # raises if it is called
    with meter.copy("write", 1):
        pass
    meter.report()
    assert listener.told == []


@pytest.mark.gpu
def test_a_copy_on_a_gpu_has_its_bytes_and_a_possible_time():
    device, listener = torch.device("cuda"), Listener()
    meter = CopyMeter(device, listener)
    host = torch.ones(1 << 24, pin_memory=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        with meter.copy("read", host.nbytes):
            there = host.to(device, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    meter.report()
    ((place, direction, num_bytes, seconds, is_alone),) = listener.told
    assert (place, direction, num_bytes, is_alone) == ("host", "read", there.nbytes, True)
    assert 1e9 < num_bytes / seconds < 1e12
