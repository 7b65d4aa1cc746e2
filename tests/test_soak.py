"""A minute of ``tests/soak.py``, and fits of ``tests/heap_check.py``."""

import ctypes
from pathlib import Path

import pytest

from tests.heap_check import CHECKS, check_heap
from tests.soak import STRATEGIES, soak, table


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(120)
def test_jobs_hold_no_more_descriptors_threads_and_files_as_they_go_on(tmp_path: Path) -> None:
    rows = soak(tmp_path, minutes=1, strategies=STRATEGIES)
    for row in rows:
        shown = table([row])
        assert len(row.descriptors) == len(row.threads) == 1, shown
        assert max(row.files) < 40, shown
        # The warm-up is longer than a minute: `python -m tests.soak` shows what comes after it.
        assert row.last_kb - row.first_kb < 5000, shown


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow(120)
def test_writes_to_gathered_parameters_leave_the_heap_whole() -> None:
    try:
        ctypes.CDLL(CHECKS)
    except OSError:
        pytest.skip(f"needs {CHECKS} of glibc")
    assert check_heap(1, rounds=1) >= 90
