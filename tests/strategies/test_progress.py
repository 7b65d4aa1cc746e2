"""Long phases before the first step are logged."""

import logging
import time

import lightning.pytorch  # noqa: F401 - sets its logger up
import pytest

from boltmesh.lightning_import import logger
from boltmesh.strategies import progress


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_a_phase_is_logged_once_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER_S", 0.5)
    kept = Kept()
    log = logger()
    log.addHandler(kept)
    try:
        with progress.long_phase("is short", is_shown=True):
            pass
        with progress.long_phase("is of another rank", is_shown=False):
            time.sleep(0.6)
        with progress.long_phase("is long", is_shown=True):
            time.sleep(1.5)
    finally:
        log.removeHandler(kept)
    first, last = kept.lines
    assert first == "boltmesh: is long ..."
    assert last.startswith("boltmesh: is long: ")
