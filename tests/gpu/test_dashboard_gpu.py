"""Readings of a real GPU by NVML, joined to the rank that computes on it."""

import socket
import time

import pytest

from boltmesh.telemetry.snapshot import RankSnapshot
from boltmesh.tui.commands.top import job_text
from boltmesh.tui.devices import DeviceReader, DeviceReading
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.panels.devices import draw_devices
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from tests.tui.samples import NOW, job, rank

pytestmark = pytest.mark.gpu

OCCUPIED_BYTES = 2**28


def _rank_on_the_first_gpu() -> RankSnapshot:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return rank(
        0,
        host=socket.gethostname(),
        device=f"cuda:0 ({properties.name})",
        # torch gives the bare UUID, NVML wants its prefix.
        device_uuid=f"GPU-{properties.uuid}",
    )


def _gpu_reading() -> DeviceReading:
    reader = DeviceReader()
    readings = reader.read(job(ranks=(_rank_on_the_first_gpu(),)))
    reader.close()
    return next(reading for reading in readings if reading.kind == "gpu")


def test_a_cuda_rank_has_the_readings_of_its_gpu() -> None:
    import torch

    held = torch.empty(OCCUPIED_BYTES, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    gpu = _gpu_reading()
    assert gpu.ranks == (0,)
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.memory_used_bytes is not None
    assert gpu.memory_total_bytes is not None
    assert held.nbytes <= gpu.memory_used_bytes <= gpu.memory_total_bytes
    assert gpu.utilization_percent is not None
    assert 0 <= gpu.utilization_percent <= 100


def test_a_busy_gpu_is_seen_to_be_busy() -> None:
    import torch

    matrix = torch.randn(4096, 4096, device="cuda:0")
    snapshot = job(ranks=(_rank_on_the_first_gpu(),))
    reader = DeviceReader()
    seen = []
    # NVML averages over up to a second, so the work goes on while it is asked.
    for _ in range(40):
        for _ in range(40):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        torch.cuda.synchronize()
        seen += [
            reading.utilization_percent
            for reading in reader.read(snapshot)
            if reading.kind == "gpu" and reading.utilization_percent is not None
        ]
    reader.close()
    assert max(seen) > 20


def test_power_heat_and_clocks_are_within_what_the_gpu_allows() -> None:
    gpu = _gpu_reading()
    assert gpu.power_watts is not None
    assert gpu.power_limit_watts is not None
    # A short peak may pass the limit that the driver enforces on the mean.
    assert 0 < gpu.power_watts < 1.5 * gpu.power_limit_watts
    assert gpu.temperature_celsius is not None
    assert 0 < gpu.temperature_celsius < 120
    for clock, most in (
        (gpu.sm_clock_mhz, gpu.sm_clock_max_mhz),
        (gpu.memory_clock_mhz, gpu.memory_clock_max_mhz),
    ):
        assert clock is not None
        assert most is not None
        assert 0 < clock <= most
    assert gpu.throttle_reasons is not None
    assert not any(reason.startswith("unknown") for reason in gpu.throttle_reasons)


def test_copies_to_the_gpu_are_seen_on_its_bus() -> None:
    import torch

    source = torch.empty(OCCUPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(OCCUPIED_BYTES, dtype=torch.uint8, device="cuda:0")
    snapshot = job(ranks=(_rank_on_the_first_gpu(),))
    reader = DeviceReader()
    rates = []
    for _ in range(20):
        for _ in range(20):
            target.copy_(source, non_blocking=True)
        # Where the driver has no counters it samples for 20 ms, so copies must be on their way.
        rates += [reading.pcie_received_bytes_per_second for reading in reader.read(snapshot)]
        torch.cuda.synchronize()
    reader.close()
    known = [rate for rate in rates if rate is not None]
    if not known:
        pytest.skip("this GPU or driver does not tell of its bus")
    assert max(known) > 1e9


def test_this_process_is_among_those_on_the_gpu() -> None:
    import torch

    held = torch.empty(OCCUPIED_BYTES, dtype=torch.uint8, device="cuda:0")
    processes = _gpu_reading().processes
    if not processes:
        pytest.skip("this driver or container hides the processes")
    sizes = [process.memory_bytes for process in processes if process.memory_bytes is not None]
    assert not sizes or max(sizes) >= held.nbytes


def test_a_look_is_cheap() -> None:
    snapshot = job(ranks=(_rank_on_the_first_gpu(),))
    reader = DeviceReader()
    reader.read(snapshot)
    start = time.process_time()
    for _ in range(10):
        reader.read(snapshot)
    spent_s = (time.process_time() - start) / 10
    reader.close()
    assert spent_s < 0.02


def test_the_readings_are_on_the_screen() -> None:
    snapshot = job(ranks=(_rank_on_the_first_gpu(),))
    reader = DeviceReader()
    state = fold(None, Observation(NOW, snapshot, reader.read(snapshot)))
    reader.close()
    (row,) = rank_rows(state)
    assert row.memory_total_bytes is not None
    total = f"/{row.memory_total_bytes / 2**30:.1f} GiB"
    look = Style(UNICODE, has_headings=False, has_signs=False)
    assert total in job_text(state, 120, look)
    (header, line) = (each.plain for each in draw_devices(state, 200, 2, look))
    assert header.startswith("device")
    assert line.startswith("cuda:0")
    assert total in line
