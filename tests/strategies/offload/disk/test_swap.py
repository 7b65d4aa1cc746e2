"""Transfers are told of, in bytes and seconds, once they have succeeded."""

import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from boltmesh.strategies.offload.disk.swap_file import Swap
from boltmesh.strategies.offload.disk.transfer import BLOCK_BYTES, Ticket
from boltmesh.strategies.offload.host_memory import allocate_host
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from tests.support.faulty_disk import EIO, FaultyCalls, failing

CPU = torch.device("cpu")


class Told(NullRecorder):
    def __init__(self) -> None:
        self.transfers: list[tuple[str, str, int]] = []
        self.seconds: list[float] = []

    def offload(
        self, place: str, direction: str, num_bytes: int, seconds: float, *, is_alone: bool = True
    ) -> None:
        self.transfers.append((place, direction, num_bytes))
        self.seconds.append(seconds)


def test_each_transfer_is_told_of_once_with_its_bytes_and_time(tmp_path: Path) -> None:
    told = Told()
    swap = Swap(tmp_path, recorder=told)
    extent = swap.allocate("three blocks and a bit", 3 * BLOCK_BYTES + 5)
    data = allocate_host(extent.num_bytes, device=CPU)
    swap.write(extent, data).wait()
    swap.read(extent, data).wait()
    num_bytes = 3 * BLOCK_BYTES + 4096
    assert told.transfers == [("disk", "write", num_bytes), ("disk", "read", num_bytes)]
    assert all(0 < seconds < 60 for seconds in told.seconds)
    swap.close()


def test_a_transfer_that_failed_is_not_told_of_and_its_ticket_explains(tmp_path: Path) -> None:
    told, calls = Told(), FaultyCalls()
    swap = Swap(tmp_path, recorder=told, calls=calls, rank=4)
    extent = swap.allocate("something", 2 * BLOCK_BYTES)
    data = allocate_host(extent.num_bytes, device=CPU)
    calls.before_write = failing(EIO, after=1)
    seen: list[Ticket] = []
    ticket = swap.write(extent, data, on_done=seen.append)
    with pytest.raises(OSError, match="rank 4 could not write something to"):
        ticket.wait()
    assert seen == [ticket]
    assert told.transfers == []
    calls.before_write = None
    with pytest.raises(OSError, match="not those that were written there"):
        swap.read(extent, data).wait()  # half of it was written: it is nothing
    swap.close()


def test_a_write_that_was_done_again_is_whole(tmp_path: Path) -> None:
    calls = FaultyCalls()
    swap = Swap(tmp_path, calls=calls)
    extent = swap.allocate("something", BLOCK_BYTES)
    data = allocate_host(extent.num_bytes, device=CPU).random_(0, 256)
    calls.before_write = failing(EIO)
    with pytest.raises(OSError, match="EIO"):
        swap.write(extent, data).wait()
    calls.before_write = None
    swap.write(extent, data).wait()
    into = allocate_host(extent.num_bytes, device=CPU)
    swap.read(extent, into).wait()
    assert torch.equal(into, data)
    swap.close()


def test_waiting_threads_hold_no_memory(tmp_path: Path) -> None:
    """The last block that a thread moved would otherwise keep its buffer for the whole run."""
    swap = Swap(tmp_path)
    extent = swap.allocate("something", BLOCK_BYTES)
    data = allocate_host(extent.num_bytes, device=CPU)
    ticket = swap.write(extent, data)
    ticket.wait()
    gone = weakref.ref(ticket)
    del ticket
    deadline = time.monotonic() + 300
    while gone() is not None:  # the thread lets go a moment after it has woken this one
        assert time.monotonic() < deadline
        time.sleep(0.001)
    swap.close()


def test_a_swap_that_nobody_holds_any_more_gives_its_disk_and_threads_back(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    swap = Swap(tmp_path, BLOCK_BYTES)
    extent = swap.allocate("something", BLOCK_BYTES)
    swap.write(extent, allocate_host(extent.num_bytes, device=CPU)).wait()
    file = swap.file
    deadline = time.monotonic() + 300
    while sys.getrefcount(swap) > 2:  # a thread lets go of its block after the ticket is done
        assert time.monotonic() < deadline
        time.sleep(0.001)
    del swap
    with pytest.raises(OSError, match="descriptor"):
        file.read(memoryview(bytearray(4096)), 0)
    assert not set(threading.enumerate()) - before
