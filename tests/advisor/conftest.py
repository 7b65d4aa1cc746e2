"""Rates of this machine for tests of plans."""

import math
from pathlib import Path

import pytest

from boltmesh.advisor.machine import rates_file, remember
from tests.support.planned_configs import RATES


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give two CPU ranks rates, so that none are measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = rates_file("cpu", 2, "32-true")
    remember(RATES, path)
    return path


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a search look at all layouts: it ends early on a machine that is busy."""
    monkeypatch.setattr("boltmesh.advisor.search.SEARCH_S", math.inf)
