"""The failure board: the first cause stays, idle ranks read it, a rank that hangs is ended."""

import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import Work

from boltmesh import failure_board
from boltmesh.errors import BoltMeshError, DivergenceError
from boltmesh.failure_board import Deadline, FailureBoard


@pytest.fixture
def job() -> Iterator[None]:
    """A process group with a store, in which several boards of one name are several ranks."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wait_until(is_true: object, timeout_s: float = 120.0) -> None:
    assert callable(is_true)
    until_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.usefixtures("job")
def test_the_first_cause_stays_on_all_ranks() -> None:
    boards = [FailureBoard(rank, "stays") for rank in range(3)]
    assert boards[0].peek() is None
    boards[1].post("rank 1 failed")
    boards[2].post("rank 2 lost rank 1")
    assert [board.wait_first() for board in boards] == ["rank 1 failed"] * 3
    assert [board.cause for board in boards] == ["rank 1 failed"] * 3


@pytest.mark.usefixtures("job")
def test_boards_of_other_names_and_rounds_are_empty() -> None:
    board, other = FailureBoard(0, "one"), FailureBoard(0, "two")
    board.post("failed")
    assert other.peek() is None
    board.reset()
    assert board.peek() is None
    board.post("failed again")
    assert board.wait_first() == "failed again"


@pytest.mark.usefixtures("job")
def test_a_cause_waits_for_its_readers() -> None:
    poster, *readers = (FailureBoard(rank, "readers") for rank in range(3))
    poster.post("failed")
    began_s = time.monotonic()
    poster.wait_for_readers(1, 0.3)
    assert time.monotonic() - began_s >= 0.3
    for reader in readers:
        assert reader.peek() == reader.peek() == "failed"
    began_s = time.monotonic()
    poster.wait_for_readers(2, 30.0)
    assert time.monotonic() - began_s < 25.0


def test_without_a_store_a_rank_knows_its_own_cause() -> None:
    board = FailureBoard(0, "no store")
    assert board.peek() is None
    board.post("failed")
    assert board.wait_first() == "failed"


@pytest.mark.usefixtures("job")
def test_only_an_idle_rank_reads_the_board() -> None:
    failing = FailureBoard(0, "idle")
    idle = FailureBoard(1, "idle", idle_s=0.0, poll_s=0.01)
    busy = FailureBoard(2, "idle", idle_s=3600.0, poll_s=0.01)
    with idle.monitoring(), busy.monitoring():
        failing.post("failed")
        wait_until(lambda: idle.cause == "failed")
        assert busy.cause is None
    for board in (idle, busy):
        board.close()


@pytest.mark.usefixtures("job")
def test_a_rank_that_hangs_is_ended_after_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[int, str]] = []
    stuck: list[BoltMeshError] = []
    monkeypatch.setattr(failure_board, "end_process", lambda *end: ends.append(end))
    board = FailureBoard(
        7, "hangs", error=DivergenceError, on_stuck=stuck.append, idle_s=0.0, poll_s=0.01
    )
    board.grace_s = 0.2
    board.post("failed")
    time.sleep(0.4)
    assert not ends, "it was not monitored"
    with board.monitoring():
        began_s = time.monotonic()
        wait_until(lambda: ends)
        assert time.monotonic() - began_s >= 0.2
    board.close()
    assert ends[0] == (1, "rank 7 ends: failed")
    assert isinstance(stuck[0], DivergenceError)
    assert str(stuck[0]) == "failed"


EXIT = """
import time
from datetime import timedelta

from torch.distributed import TCPStore

from boltmesh.failure_board import Monitor

store = TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=60))
checks = 0

def check():
    global checks
    for _ in range(200):
        store.check(["cause"])
        checks += 1

monitor = Monitor(check, 0.0, name="checks")
monitor.start()
while not checks:
    time.sleep(0.01)
"""


def test_a_process_ends_well_while_its_monitor_reads_the_store() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_end_process_ends_a_process_whose_main_thread_hangs() -> None:
    code = (
        "import atexit, threading, time; from boltmesh.process import end_process\n"
        "atexit.register(print, 'unwound')\n"
        "threading.Timer(0.1, end_process, (3, 'rank 0 ends: failed')).start()\n"
        "time.sleep(600)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 3
    assert done.stderr == "boltmesh: rank 0 ends: failed\n"
    assert not done.stdout


class Message(Work):
    """A message that never arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts_s: list[float | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.timeouts_s.append(None if timeout is None else timeout.total_seconds())
        raise RuntimeError("Timed out")


def test_all_waits_after_a_failure_share_one_timeout() -> None:
    message, deadline = Message(), Deadline(timedelta(seconds=60))
    with pytest.raises(RuntimeError, match="Timed out"):
        deadline.wait([None, message])
    deadline.begin(time.monotonic() - 20)
    deadline.wait_despite_errors([message, message])
    deadline.begin(time.monotonic() - 120)  # the others still get time to read of the failure
    deadline.wait_despite_errors([message])
    before, first, second, late = message.timeouts_s
    assert before is None
    assert first is not None
    assert second is not None
    assert late is not None
    assert 30 < second <= first <= 40
    assert 1 < late <= 3
