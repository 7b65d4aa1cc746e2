"""Tickets tell of all their blocks; pools serve what is urgent first."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from boltmesh.strategies.offload.disk.transfer import (
    STACK_BYTES,
    Ticket,
    TransferPool,
    stacks_of,
)

MEMORY = torch.zeros(1, dtype=torch.uint8)


@pytest.fixture
def pool():
    pool = TransferPool(1, "test")
    yield pool
    pool.close()


def test_a_ticket_is_done_when_its_last_block_is(pool: TransferPool) -> None:
    seen: list[int] = []
    called: list[Ticket] = []
    ticket = Ticket(MEMORY, 3, called.append)
    pool.submit(ticket, [lambda n=n: seen.append(n) for n in range(3)])  # type: ignore[misc]
    ticket.wait()
    assert seen == [0, 1, 2]
    assert called == [ticket]
    assert ticket.is_done


def test_the_first_error_of_any_block_reaches_the_waiter(pool: TransferPool) -> None:
    def fail(what: str) -> None:
        raise OSError(what)

    ticket = Ticket(MEMORY, 3, lambda _: None)
    pool.submit(ticket, [lambda: None, lambda: fail("first"), lambda: fail("second")])
    with pytest.raises(OSError, match="first"):
        ticket.wait()
    after = Ticket(MEMORY, 1, lambda _: None)
    pool.submit(after, [lambda: None])
    after.wait()  # the thread lives on


def test_an_error_of_the_callback_reaches_the_waiter(pool: TransferPool) -> None:
    def callback(_: Ticket) -> None:
        raise MemoryError("no buffer")

    ticket = Ticket(MEMORY, 1, callback)
    pool.submit(ticket, [lambda: None])
    with pytest.raises(MemoryError, match="no buffer"):
        ticket.wait()


def test_urgent_blocks_overtake_and_others_keep_their_order(pool: TransferPool) -> None:
    begun, gate = threading.Event(), threading.Event()
    seen: list[str] = []

    def stand() -> None:
        begun.set()
        assert gate.wait(10)
        seen.append("first")

    pool.submit(Ticket(MEMORY, 1, lambda _: None), [stand])
    assert begun.wait(10)
    tickets = []
    for name, is_urgent in (("a", False), ("b", False), ("now", True), ("c", False)):
        ticket = Ticket(MEMORY, 1, lambda _: None)
        block = lambda name=name: seen.append(name)  # noqa: E731 - binds the name
        pool.submit(ticket, [block], is_urgent=is_urgent)
        tickets.append(ticket)
    gate.set()
    for ticket in tickets:
        ticket.wait()
    assert seen == ["first", "now", "a", "b", "c"]


def test_a_pool_leaves_the_number_of_torch_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    inside: list[int] = []
    pool = TransferPool(2, "test")
    ticket = Ticket(MEMORY, 1, lambda _: None)
    pool.submit(ticket, [lambda: inside.append(torch.get_num_threads())])
    ticket.wait()
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    pool.close()
    assert inside == [1]
    assert torch.get_num_threads() == before
    assert later == [before]


FIRST = """
import torch
from boltmesh.strategies.offload.disk.transfer import TransferPool
TransferPool(2, "test").close()
print(torch.get_num_threads())
"""


@pytest.mark.full
def test_a_pool_that_is_the_first_to_ask_torch_for_threads_does_not_settle_their_number() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", FIRST]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["2"]


def test_closing_finishes_what_is_queued() -> None:
    pool = TransferPool(2, "test")
    seen: list[int] = []
    ticket = Ticket(MEMORY, 50, lambda _: None)
    pool.submit(ticket, [lambda n=n: seen.append(n) for n in range(50)])  # type: ignore[misc]
    pool.close()
    assert sorted(seen) == list(range(50))
    assert ticket.is_done


def test_pools_that_begin_at_a_time_leave_the_size_of_stacks_as_it_was() -> None:
    before = threading.stack_size()
    with stacks_of(STACK_BYTES):
        other = threading.Thread(target=_enter)
        other.start()
        other.join(0.2)
        assert other.is_alive()  # it would take the size of this moment for the usual one
    other.join()
    assert threading.stack_size() == before


def _enter() -> None:
    with stacks_of(2 * STACK_BYTES):
        pass
