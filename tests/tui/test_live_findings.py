"""Findings on a healthy job while other processes take every core of its host."""

import contextlib
import time
from itertools import pairwise
from pathlib import Path

import pytest

from boltmesh.telemetry.reader.reader import open_job
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.sources.live import LiveSource
from boltmesh.tui.state import State, fold
from tests.tui.training import busy_cores, run_training

pytestmark = [pytest.mark.ranks, pytest.mark.full]

LOOKS = 100
PAUSE_S = 0.2
START_S = 2.0
"""Until all of the other processes compute."""


def test_they_change_at_most_once_in_100_looks_and_name_the_host(tmp_path: Path) -> None:
    found: list[set[str]] = []
    state: State | None = None
    with run_training(tmp_path), busy_cores(), contextlib.closing(LiveSource(open_job())) as source:
        source.read()  # the load of a process is a difference of two looks
        time.sleep(START_S)
        for _ in range(LOOKS):
            time.sleep(PAUSE_S)
            state = fold(state, source.read())
            found.append({finding.kind for finding in diagnose(state)})
    assert state is not None
    (host,) = [device for device in state.devices if device.kind == "host"]
    if (host.utilization_percent or 0) < 90:
        pytest.skip("the cores of this host are not all for this process")
    assert sum(before != after for before, after in pairwise(found)) <= 1
    assert found[-1] == {"host"}
