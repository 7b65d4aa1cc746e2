"""What ranks tell each other of their calls, without a process group."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch._C._distributed_c10d import HashStore, Store

from boltmesh.failure_board import FailureBoard
from boltmesh.strategies.data_parallel import order_check
from boltmesh.strategies.data_parallel.order_check import Watchdog

NAMED = "called all_gather of 'head\udcff'"
"""A module may have a name that no encoding has."""


def test_names_that_no_encoding_has_hide_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = HashStore()

    @contextmanager
    def store(board: FailureBoard) -> Iterator[Store]:
        yield shared

    monkeypatch.setattr(FailureBoard, "store", store)
    monkeypatch.setattr(FailureBoard, "wait_for_readers", lambda *_: None)
    monkeypatch.setattr(order_check, "_GATHER_ANSWERS_S", 0.0)
    calls = {1: NAMED, 2: "called all_gather of 'body'"}
    one, same, other = (
        Watchdog(rank, "test", calls.get, patience_s=60, on_stuck=lambda _: None)
        for rank in range(3)
    )
    same._call_at = lambda _: NAMED
    other._call_at = lambda _: calls[2]
    one.report_mismatch(1, NAMED)
    assert same.diagnose() is None
    said = other.diagnose()
    assert said is not None
    assert said.startswith(
        r"Ranks issued different collectives: rank 2 called all_gather of 'body' while rank 0 "
        r"called all_gather of 'head\udcff'."
    )
    assert one.diagnose_own(1, NAMED) == said
