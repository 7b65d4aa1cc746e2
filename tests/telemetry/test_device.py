"""The timeline of a CUDA device, on streams and events that a test moves."""

from contextlib import contextmanager
from types import SimpleNamespace

import pynvml
import pytest
import torch

from boltmesh.telemetry.snapshot import PHASES
from boltmesh.telemetry.writer import device as devices
from boltmesh.telemetry.writer.device import MAX_WAITS, CudaTimeline, DeviceLoad, uuid
from tests.tui.fake_nvml import FakeNvml

DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER = map(
    PHASES.index, ("data", "forward", "backward", "communication", "optimizer")
)


class Device:
    """Streams, each with the time at which it has done what was enqueued on it."""

    def __init__(self):
        self.current = "compute"
        self.ms = {"compute": 0.0, "all-gather": 0.0}

    def run(self, ms):
        self.ms[self.current] += ms

    @contextmanager
    def stream(self, name):
        before, self.current = self.current, name
        yield
        self.current = before

    def wait(self, name):
        """The current stream waits for what another has enqueued."""
        self.ms[self.current] = max(self.ms[self.current], self.ms[name])


@pytest.fixture
def device(monkeypatch):
    found = Device()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.ms = found.ms[stream]

        def query(self):
            return True

        def elapsed_time(self, end):
            return end.ms - self.ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def shown(marks):
    time = marks.read()
    assert sum(time.phases_ns) == time.total_ns
    return {name: ns / 1e6 for name, ns in zip(PHASES, time.phases_ns, strict=True) if ns}


def test_a_gather_on_a_stream_of_its_own_counts_as_far_as_the_computation_waits_for_it(device):
    timeline = CudaTimeline(DATA)
    device.run(1)
    timeline.mark(FORWARD)
    with device.stream("all-gather"):
        timeline.mark(COMMUNICATION)
        device.run(8)
        timeline.mark(FORWARD)
    device.run(6)
    timeline.mark(COMMUNICATION)
    device.wait("all-gather")
    timeline.mark(FORWARD)
    device.run(3)
    assert shown(timeline.end_step(DATA)) == {"data": 1, "communication": 1, "forward": 9}


def test_waits_without_end_leave_the_phases_right(device):
    timeline = CudaTimeline(FORWARD)
    for _ in range(MAX_WAITS + 100):
        device.run(1)
        timeline.mark(COMMUNICATION)
        device.run(1)
        timeline.mark(FORWARD)
    timeline.mark(OPTIMIZER)
    device.run(50)
    assert shown(timeline.end_step(DATA)) == {
        "communication": MAX_WAITS,
        "forward": MAX_WAITS + 200,
        "optimizer": 50,
    }
    timeline.mark(COMMUNICATION)
    device.run(2)
    assert shown(timeline.end_step(DATA)) == {"communication": 2}


def test_the_tail_of_a_backward_pass_is_communication(device):
    timeline = CudaTimeline(BACKWARD)
    device.run(10)
    timeline.mark_enqueue()
    device.run(4)
    timeline.mark_backward_end()
    timeline.mark(OPTIMIZER)
    device.run(1)
    assert shown(timeline.end_step(DATA)) == {"backward": 10, "communication": 4, "optimizer": 1}


@pytest.mark.parametrize(
    ("name", "expected"), [("NVIDIA H200", "GPU-8f3c"), ("NVIDIA H100 MIG 1g.10gb", "MIG-8f3c")]
)
def test_a_slice_of_a_gpu_has_the_name_that_nvml_gives_it(name, expected, monkeypatch):
    properties = SimpleNamespace(name=name, uuid="8f3c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert uuid(torch.device("cuda", 0)) == expected


@pytest.fixture
def passed(monkeypatch):
    """Adds seconds to the clocks of the wall and of the process."""
    now = {"monotonic": 50.0, "process_time": 7.0}

    def add(wall_s, cpu_s):
        now["monotonic"] += wall_s
        now["process_time"] += cpu_s

    clocks = {name: lambda name=name: now[name] for name in now}
    monkeypatch.setattr(devices, "time", SimpleNamespace(**clocks))
    return add


def test_the_load_of_a_process_is_its_cpu_time_at_most_once_a_second(passed):
    load = DeviceLoad(None)
    assert load.read() == {}
    passed(2.0, 3.0)
    assert load.read() == {"utilisation_percent": pytest.approx(150)}
    passed(0.5, 0.5)
    assert load.read() == {}
    passed(0.5, 0.0)
    assert load.read() == {"utilisation_percent": pytest.approx(50)}


@pytest.mark.parametrize("unsupported", [(), ("nvmlDeviceGetPowerUsage",), ("nvmlInit",)])
def test_the_load_of_a_gpu_is_what_its_driver_tells(monkeypatch, passed, unsupported):
    nvml = FakeNvml(*unsupported)
    for name in ("DeviceGetUtilizationRates", "DeviceGetPowerUsage", "DeviceGetTemperature"):
        monkeypatch.setattr(pynvml, f"nvml{name}", getattr(nvml, f"nvml{name}"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", nvml.nvmlDeviceGetHandleByUUID)
    if "nvmlInit" not in unsupported:  # the driver's own says that there is none here
        monkeypatch.setattr(pynvml, "nvmlInit", nvml.nvmlInit)
    load = DeviceLoad("GPU-a")
    passed(1.0, 1.0)
    expected = {"utilisation_percent": 97.0, "power_watts": 650.5, "temperature_celsius": 61.0}
    if unsupported:
        del expected["power_watts"]
    assert load.read() == ({} if "nvmlInit" in unsupported else expected)
