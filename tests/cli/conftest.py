"""Runs in a folder of their own, with telemetry of their own."""

import signal
from pathlib import Path

import pytest

from boltmesh.launch.stopping import HANDLED

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "support" / "tiny.yaml"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Stand in an empty folder, as a user would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOLTMESH_RUN_DIR", str(tmp_path / "telemetry"))
    for name in ("BOLTMESH_JOB_ID", "BOLTMESH_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def signals_as_they_were():
    """Commands that run in the test's own process take over its signals."""
    before = {each: signal.getsignal(each) for each in HANDLED}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)
