"""Readings of processes and the host by psutil, and of GPUs by a stand-in for NVML."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pynvml
import pytest

from boltmesh.telemetry.snapshot import Memory
from boltmesh.tui.demo import DemoSource
from boltmesh.tui.demo.nvml import DemoNvml, NvmlDemoSource
from boltmesh.tui.devices import DeviceReader, DeviceReading, GpuProcess
from boltmesh.tui.devices.gpu import Gpu, Rates, throttle_words
from boltmesh.tui.devices.reader import RankProcess
from boltmesh.tui.export.prometheus import prometheus_text
from boltmesh.tui.metrics.figures import figures
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from tests.support.cpu_time import least_cpu_s
from tests.tui.fake_nvml import FakeNvml
from tests.tui.samples import NOW, demo, job, rank

GIB = 2**30
HERE = socket.gethostname()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _own(**changes: Any) -> Any:
    return job(ranks=(rank(3, pid=os.getpid(), host=HERE, **changes),))


def _kinds(readings: tuple[DeviceReading, ...], kind: str) -> list[DeviceReading]:
    return [reading for reading in readings if reading.kind == kind]


def test_a_process_is_measured_between_two_looks() -> None:
    reader = DeviceReader()
    (first,) = _kinds(reader.read(_own()), "process")
    (second,) = _kinds(reader.read(_own()), "process")
    assert first.utilization_percent is None
    assert first.disk_read_bytes_per_second is None
    assert second.utilization_percent is not None
    assert second.ranks == (3,)
    assert second.pid == os.getpid()
    assert second.memory_used_bytes is not None
    assert 1e6 < second.memory_used_bytes < (second.memory_total_bytes or 0)
    assert 0 < (second.shared_memory_bytes or 0) < second.memory_used_bytes
    assert (second.num_threads or 0) >= 1


def test_what_a_process_writes_to_its_disk_is_a_rate(tmp_path: Path) -> None:
    clock = Clock()
    process = RankProcess(os.getpid(), clock=clock)
    process.read(0, HERE, 1)
    with (tmp_path / "written").open("wb") as file:
        file.write(bytes(2**20))
        file.flush()
        os.fsync(file.fileno())
    clock.now += 2.0
    reading = process.read(0, HERE, 1)
    if not psutil.Process().io_counters().write_bytes:
        pytest.skip("this file system has no disk, so nothing is counted")
    assert reading.disk_written_bytes_per_second is not None
    assert reading.disk_written_bytes_per_second >= 2**19


def test_the_process_that_is_busy_is_seen_to_be_busy() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        process, own = RankProcess(busy.pid), psutil.Process(busy.pid)
        begun = time.monotonic()
        process.read(0, HERE, 1)
        used_s = own.cpu_times().user
        while own.cpu_times().user < used_s + 0.2:  # which a loaded machine may give it slowly
            time.sleep(0.01)
        percent = process.read(0, HERE, 1).utilization_percent
        assert percent is not None
        assert percent > 0.9 * 100 * 0.2 / (time.monotonic() - begun)
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.parametrize("state", ["finished", "failed", "dead", "missing"])
def test_the_pid_of_an_ended_rank_may_be_anybodys_and_is_not_read(state: str) -> None:
    assert DeviceReader().read(_own(state=state)) == ()


def test_a_rank_of_another_host_is_not_looked_for_here() -> None:
    there = job(ranks=(rank(0, pid=os.getpid(), host="another", device_uuid="GPU-a"),))
    assert DeviceReader().read(there) == ()


def test_a_rank_that_is_a_summary_is_of_another_host_by_the_same_name() -> None:
    assert DeviceReader().read(_own(is_summary=True)) == ()


def test_a_process_that_has_just_gone_is_left_out() -> None:
    gone = job(ranks=(rank(0, pid=2**22 + 1, host=HERE),))
    assert DeviceReader().read(gone) == ()


def test_a_figure_that_is_hidden_from_this_user_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def denied(_: object) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "io_counters", denied)
    reader = DeviceReader()
    reader.read(_own())
    (reading,) = _kinds(reader.read(_own()), "process")
    assert reading.disk_read_bytes_per_second is None
    assert reading.memory_used_bytes is not None


def test_the_host_tells_of_the_disk_that_the_run_directory_is_on(tmp_path: Path) -> None:
    reader = DeviceReader(tmp_path)
    (first,) = _kinds(reader.read(_own()), "host")
    (second,) = _kinds(reader.read(_own()), "host")
    assert first.utilization_percent is None
    assert second.utilization_percent is not None
    assert second.ranks == (3,)
    assert second.name == HERE
    assert second.num_cores == psutil.cpu_count()
    assert second.disk_folder == str(tmp_path)
    assert 0 < (second.disk_free_bytes or 0) < (second.disk_total_bytes or 0)
    assert 0 < (second.memory_used_bytes or 0) < (second.memory_total_bytes or 0)
    assert second.swap_used_bytes is not None
    assert second.note is None


def test_a_run_directory_that_is_gone_leaves_its_disk_unknown(tmp_path: Path) -> None:
    (host,) = _kinds(DeviceReader(tmp_path / "gone").read(_own()), "host")
    assert host.disk_free_bytes is None


def test_a_look_at_eight_processes_takes_milliseconds() -> None:
    pids = [os.getpid()] * 8
    ranks = tuple(rank(at, pid=pid, host=HERE) for at, pid in enumerate(pids))
    reader = DeviceReader()
    reader.read(job(ranks=ranks))
    assert least_cpu_s(lambda: reader.read(job(ranks=ranks)), times=10) < 0.02


def _on_gpus(*uuids: str | None) -> Any:
    return job(
        ranks=tuple(rank(n, pid=None, host=HERE, device_uuid=uuid) for n, uuid in enumerate(uuids))
    )


def _reader(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> DeviceReader:
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, getattr(nvml, name))
    reader = DeviceReader()
    nvml.nvmlInit()
    monkeypatch.setattr(reader, "_load_nvml", lambda: nvml)
    return reader


def _gpu(nvml: FakeNvml, clock: Clock | None = None) -> Gpu:
    nvml.nvmlInit()
    return Gpu(nvml, "GPU-a", clock=clock or Clock())  # type: ignore[arg-type]


def test_ranks_that_share_a_gpu_share_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _reader(monkeypatch, FakeNvml()).read(_on_gpus("GPU-a", "GPU-b", "GPU-a", None))
    assert [(reading.uuid, reading.ranks) for reading in found] == [
        ("GPU-a", (0, 2)),
        ("GPU-b", (1,)),
    ]


@pytest.mark.parametrize("state", ["finished", "failed", "dead", "missing"])
def test_the_gpu_of_an_ended_rank_may_serve_another_job_and_is_not_read(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Another user's job fills the GPU; what the ended one shows of itself is what it recorded."""
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    nvml = DemoNvml()
    busy = msgspec.structs.replace(
        next(each for each in demo().devices if each.kind == "gpu"),
        memory_used_bytes=77 * GIB,
        utilization_percent=97.0,
    )
    nvml.readings = {"GPU-a": busy, "GPU-b": busy}
    reader = DeviceReader()
    monkeypatch.setattr(reader, "_load_nvml", lambda: nvml)
    recorded = Memory(GIB, 30 * GIB, 40 * GIB, 38 * GIB)
    changes: dict[str, Any] = {"pid": None, "host": HERE, "device": "cuda", "memory": recorded}
    ended = rank(0, device_uuid="GPU-a", state=state, **changes)
    alive = rank(1, device_uuid="GPU-b", **changes)
    for ranks, uuids in (((ended,), []), ((ended, alive), ["GPU-b"])):
        seen = job(ranks=ranks, state="crashed")
        readings = reader.read(seen)
        assert [each.uuid for each in readings] == uuids
        # A recording of an older boltmesh has the GPU's readings.
        for devices in (readings, (msgspec.structs.replace(busy, uuid="GPU-a"), *readings)):
            shown = fold(None, Observation(NOW, seen, devices))
            row = rank_rows(shown)[0]
            assert (row.memory_used_bytes, row.utilization_percent) == (40 * GIB, None)
            if not uuids:
                assert figures(shown).memory_bytes.value == 40 * GIB
                assert figures(shown).utilisation.value is None
        text = prometheus_text(Observation(NOW, seen, readings))
        assert text.count("\nboltmesh_device_memory_used_bytes{") == len(uuids)


def test_profiling_counters_give_activity_between_two_looks() -> None:
    nvml = FakeNvml()
    nvml.activity = {
        pynvml.NVML_GPM_METRIC_SM_UTIL: 83.5,
        pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 41.25,
        pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: float("nan"),
    }
    gpu = _gpu(nvml)
    assert gpu.read((0,)).sm_active_percent is None  # needs two samples
    found = gpu.read((0,))
    assert (found.sm_active_percent, found.tensor_active_percent) == (83.5, 41.25)
    assert found.sm_occupancy_percent is None  # a metric that this model lacks
    assert found.memory_bandwidth_percent is None  # not a number
    nvml.unsupported = ("nvmlGpmSampleGet",)
    assert gpu.read((0,)).sm_active_percent is None
    nvml.unsupported = ()
    assert gpu.read((0,)).sm_active_percent is None  # the sample before is too old
    assert gpu.read((0,)).sm_active_percent == 83.5


def test_a_gpu_without_profiling_counters_is_not_sampled() -> None:
    nvml = FakeNvml()
    gpu = _gpu(nvml)
    gpu.read((0,))
    assert gpu.read((0,)).sm_active_percent is None
    assert not {"nvmlGpmSampleAlloc", "nvmlGpmSampleGet"} & set(nvml.calls)


def test_every_figure_has_its_unit() -> None:
    reading = _gpu(FakeNvml()).read((0,))
    assert reading == DeviceReading(
        kind="gpu",
        ranks=(0,),
        name="NVIDIA H100",
        uuid="GPU-a",
        utilization_percent=97.0,
        memory_used_bytes=60 * 2**30,
        memory_total_bytes=80 * 2**30,
        power_watts=650.5,
        temperature_celsius=61.0,
        memory_utilization_percent=41.0,
        power_limit_watts=700.0,
        temperature_limit_celsius=87.0,
        sm_clock_mhz=1755,
        sm_clock_max_mhz=1980,
        memory_clock_mhz=2619,
        memory_clock_max_mhz=2619,
        throttle_reasons=("power limit",),
        ecc_corrected_errors=12,
        ecc_uncorrected_errors=1,
        processes=(GpuProcess(7, None),),
    )


UNSUPPORTED = {
    "nvmlDeviceGetUtilizationRates": {"utilization_percent", "memory_utilization_percent"},
    "nvmlDeviceGetMemoryInfo": {"memory_used_bytes", "memory_total_bytes"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetTemperature": {"temperature_celsius"},
    "nvmlDeviceGetTemperatureThreshold": {"temperature_limit_celsius"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetMaxClockInfo": {"sm_clock_max_mhz", "memory_clock_max_mhz"},
    "nvmlDeviceGetCurrentClocksEventReasons": set(),
    "nvmlDeviceGetTotalEccErrors": {"ecc_corrected_errors", "ecc_uncorrected_errors"},
    "nvmlDeviceGetComputeRunningProcesses": {"processes"},
    "nvmlDeviceGetFieldValues": set(),
}


@pytest.mark.parametrize(("call", "fields"), UNSUPPORTED.items())
def test_what_a_model_cannot_tell_is_unknown_and_the_rest_is_kept(
    call: str, fields: set[str]
) -> None:
    whole, part = _gpu(FakeNvml()).read((0,)), _gpu(FakeNvml(call)).read((0,))
    changed = {
        name for name in whole.__struct_fields__ if getattr(whole, name) != getattr(part, name)
    }
    assert changed == fields
    assert all(getattr(part, field) is None for field in fields)


def test_a_gpu_that_tells_nothing_is_still_listed() -> None:
    reading = _gpu(FakeNvml(*UNSUPPORTED, "nvmlDeviceGetName",
                            "nvmlDeviceGetCurrentClocksThrottleReasons")).read((0,))  # fmt: skip
    assert reading == DeviceReading(kind="gpu", ranks=(0,), name="GPU-a", uuid="GPU-a")


def test_links_are_rates_between_two_looks() -> None:
    nvml, clock = FakeNvml(), Clock()
    gpu = _gpu(nvml, clock)
    sent, received = (
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    )
    pcie = pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES
    nvml.counters = {sent: 1_000, received: 2_000, pcie[0]: 10_000, pcie[1]: 20_000}
    assert gpu.read((0,)).nvlink_sent_bytes_per_second is None
    nvml.counters = {sent: 1_500, received: 2_100, pcie[0]: 10_400, pcie[1]: 20_000}
    clock.now += 2.0
    reading = gpu.read((0,), may_wait=True)
    # NVLink counts in KiB, PCIe in bytes.
    assert reading.nvlink_sent_bytes_per_second == 250 * 1024
    assert reading.nvlink_received_bytes_per_second == 50 * 1024
    assert reading.pcie_sent_bytes_per_second == 200
    assert reading.pcie_received_bytes_per_second == 0
    assert "nvmlDeviceGetPcieThroughput" not in nvml.calls


def test_pcie_without_counters_is_measured_on_one_gpu_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = FakeNvml()
    reader = _reader(monkeypatch, nvml)
    for look in range(3):
        nvml.calls.clear()
        seen = reader.read(_on_gpus("GPU-a", "GPU-b", "GPU-c"))
        assert nvml.calls.count("nvmlDeviceGetPcieThroughput") == 2
        # What was measured stays until its turn comes again.
        known = [reading.pcie_received_bytes_per_second for reading in seen]
        assert known == [900 * 1024] * (look + 1) + [None] * (2 - look)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), ()),
        (("GpuIdle",), ("idle",)),
        (("SwPowerCap",), ("power limit",)),
        (("HwSlowdown", "HwThermalSlowdown"), ("HW thermal",)),
        (("HwSlowdown", "HwPowerBrakeSlowdown"), ("HW power brake",)),
        (("HwSlowdown",), ("HW slowdown",)),
        (("SwPowerCap", "SwThermalSlowdown"), ("power limit", "SW thermal")),
    ],
)  # fmt: skip
def test_throttling_is_told_in_words(names: tuple[str, ...], words: tuple[str, ...]) -> None:
    bits = sum(getattr(pynvml, f"nvmlClocksEventReason{name}") for name in names)
    assert throttle_words(pynvml, bits) == words


def test_a_reason_without_a_name_is_not_lost() -> None:
    assert throttle_words(pynvml, 2**40) == ("unknown reason 0x10000000000",)


def test_a_driver_before_535_is_asked_by_the_old_name() -> None:
    nvml = FakeNvml("nvmlDeviceGetCurrentClocksEventReasons")
    assert _gpu(nvml).read((0,)).throttle_reasons == ("power limit",)


def test_a_gpu_that_nvml_does_not_know_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    (host,) = _reader(monkeypatch, FakeNvml()).read(_on_gpus("GPU-lost"))
    assert host.kind == "host"
    assert host.note is not None
    assert "GPU-lost" in host.note


def test_the_driver_is_not_touched_for_a_job_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = DeviceReader()
    monkeypatch.setattr(reader, "_load_nvml", lambda: pytest.fail("NVML was loaded"))
    reader.read(_own())


def test_a_host_without_the_driver_has_a_note_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    reader = DeviceReader()
    (host,) = reader.read(_on_gpus("GPU-a"))
    reader.close()
    assert host.note is not None
    assert host.note.startswith("GPUs are not read: ")


def test_nvml_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setattr(pynvml, "nvmlInit", nvml.nvmlInit)
    monkeypatch.setattr(pynvml, "nvmlShutdown", nvml.nvmlShutdown)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", nvml.nvmlDeviceGetHandleByUUID)
    reader = DeviceReader()
    assert reader._load_nvml() is pynvml
    reader.close()
    reader.close()
    assert nvml.calls.count("nvmlShutdown") == 1


def test_rates_need_two_looks_and_survive_a_reset() -> None:
    clock = Clock()
    rates = Rates(clock)
    assert rates.since_last({"a": 10.0}) == {}
    assert rates.since_last({"a": 20.0}) == {}  # no time has passed
    clock.now += 5
    assert rates.since_last({"a": 30.0, "b": 1.0}) == {"a": 2.0}
    clock.now += 1
    assert rates.since_last({"a": 3.0, "b": 1.0}) == {"b": 0.0}


def test_the_demo_reads_its_gpus_through_a_driver() -> None:
    clock = Clock()

    def wall() -> float:
        return NOW + clock.now

    source = NvmlDemoSource(clock=wall, monotonic=clock)
    beside = DemoSource(clock=wall, scenario="straggler")
    source.read()
    for _ in range(3):
        clock.now += 1
        seen, plain = source.read().devices, beside.read().devices
    assert len(seen) == len(plain)
    for ours, theirs in zip(seen, plain, strict=True):
        if ours.kind != "gpu":
            continue
        for name in ("nvlink_sent", "nvlink_received", "pcie_sent", "pcie_received"):
            field = f"{name}_bytes_per_second"
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=1e-3)
        gauges = ("utilization_percent", "power_watts", "sm_clock_mhz", "throttle_reasons")
        for field in (*gauges, "memory_used_bytes", "temperature_celsius", "processes"):
            assert getattr(ours, field) == getattr(theirs, field)
    assert any(device.throttle_reasons for device in seen)
