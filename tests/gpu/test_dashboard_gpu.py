"""Readings of a real GPU by NVML, joined to the rank that computes on it."""

import socket

import pytest

from boltmesh.telemetry.snapshot import RankSnapshot
from boltmesh.tui.devices import DeviceReader
from boltmesh.tui.drawing.glyphs import UNICODE
from boltmesh.tui.drawing.look import Look
from boltmesh.tui.figures.ranks import rank_rows
from boltmesh.tui.report import job_text
from boltmesh.tui.source import Observation
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


def test_a_cuda_rank_has_the_readings_of_its_gpu() -> None:
    import torch

    held = torch.empty(OCCUPIED_BYTES, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    reader = DeviceReader()
    readings = reader.read(job(ranks=(_rank_on_the_first_gpu(),)))
    reader.close()
    gpu = next(reading for reading in readings if reading.kind == "gpu")
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


def test_the_readings_are_on_the_screen() -> None:
    snapshot = job(ranks=(_rank_on_the_first_gpu(),))
    reader = DeviceReader()
    state = fold(None, Observation(NOW, snapshot, reader.read(snapshot)))
    reader.close()
    (row,) = rank_rows(state)
    assert row.memory_total_bytes is not None
    text = job_text(state, 120, Look(UNICODE, has_headings=False, has_signs=False))
    assert f"/{row.memory_total_bytes / 2**30:.1f} GiB" in text
