"""Readings of processes by psutil, and of GPUs by a stand-in for NVML."""

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from boltmesh.tui import devices
from boltmesh.tui.devices import DeviceReader
from tests.tui.samples import job, rank


def _own(**changes: Any) -> Any:
    return job(ranks=(rank(3, pid=os.getpid(), host=socket.gethostname(), **changes),))


def test_a_process_is_measured_between_two_looks() -> None:
    reader = DeviceReader()
    (first,) = reader.read(_own())
    (second,) = reader.read(_own())
    assert first.utilization_percent is None
    assert second.utilization_percent is not None
    assert second.ranks == (3,)
    assert second.pid == os.getpid()
    assert second.memory_used_bytes is not None
    assert 1e6 < second.memory_used_bytes < (second.memory_total_bytes or 0)


@pytest.mark.parametrize("state", ["finished", "failed", "dead", "missing"])
def test_the_pid_of_an_ended_rank_may_be_anybodys_and_is_not_read(state: str) -> None:
    assert DeviceReader().read(_own(state=state)) == ()


def test_a_rank_of_another_host_is_not_looked_for_here() -> None:
    there = job(ranks=(rank(0, pid=os.getpid(), host="another", device_uuid="GPU-a"),))
    assert DeviceReader().read(there) == ()


def test_a_process_that_has_just_gone_is_left_out() -> None:
    gone = job(ranks=(rank(0, pid=2**22 + 1, host=socket.gethostname()),))
    assert DeviceReader().read(gone) == ()


class FakeNvml:
    """As much of pynvml as is used; ``unsupported`` names what this model cannot tell."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *unsupported: str) -> None:
        self.unsupported = unsupported
        self.is_initialised = False

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_initialised = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_initialised = False

    def __getattr__(self, name: str) -> Any:
        values = {
            "nvmlDeviceGetName": "NVIDIA H100",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=60 * 2**30, total=80 * 2**30),
            "nvmlDeviceGetPowerUsage": 650_500,
            "nvmlDeviceGetTemperature": 61,
        }

        def call(*arguments: Any) -> Any:
            assert self.is_initialised
            if name in self.unsupported:
                raise self.NVMLError(name)
            if name == "nvmlDeviceGetHandleByUUID":
                if arguments[0] == "GPU-lost":
                    raise self.NVMLError(name)
                return arguments[0]
            return values[name]

        return call


def _on_gpus(*uuids: str | None) -> Any:
    here = socket.gethostname()
    return job(
        ranks=tuple(rank(n, pid=None, host=here, device_uuid=uuid) for n, uuid in enumerate(uuids))
    )


def _reader(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> DeviceReader:
    reader = DeviceReader()
    nvml.nvmlInit()
    monkeypatch.setattr(reader, "_load_nvml", lambda: nvml)
    return reader


def test_ranks_that_share_a_gpu_share_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _reader(monkeypatch, FakeNvml()).read(_on_gpus("GPU-a", "GPU-b", "GPU-a", None))
    assert [(reading.uuid, reading.ranks) for reading in found] == [
        ("GPU-a", (0, 2)),
        ("GPU-b", (1,)),
    ]
    assert found[0].name == "NVIDIA H100"
    assert found[0].utilization_percent == 97.0
    assert found[0].memory_used_bytes == 60 * 2**30
    assert found[0].memory_total_bytes == 80 * 2**30
    assert found[0].power_watts == 650.5
    assert found[0].temperature_celsius == 61.0


@pytest.mark.parametrize(
    ("call", "field"),
    [("nvmlDeviceGetUtilizationRates", "utilization_percent"),
     ("nvmlDeviceGetMemoryInfo", "memory_used_bytes"),
     ("nvmlDeviceGetPowerUsage", "power_watts"),
     ("nvmlDeviceGetTemperature", "temperature_celsius")],
)  # fmt: skip
def test_what_a_model_cannot_tell_is_unknown_and_the_rest_is_kept(
    call: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (reading,) = _reader(monkeypatch, FakeNvml(call)).read(_on_gpus("GPU-a"))
    known = {"utilization_percent", "memory_used_bytes", "power_watts", "temperature_celsius"}
    assert getattr(reading, field) is None
    assert all(getattr(reading, other) is not None for other in known - {field})


def test_a_gpu_that_nvml_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _reader(monkeypatch, FakeNvml()).read(_on_gpus("GPU-lost")) == ()


def test_the_driver_is_not_touched_for_a_job_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = DeviceReader()
    monkeypatch.setattr(reader, "_load_nvml", lambda: pytest.fail("NVML was loaded"))
    reader.read(_own())


def test_a_host_without_the_driver_has_no_gpu_readings() -> None:
    if devices.DeviceReader()._load_nvml() is not None:
        pytest.skip("this host has NVIDIA's driver")
    reader = DeviceReader()
    assert reader.read(_on_gpus("GPU-a")) == ()
    reader.close()
