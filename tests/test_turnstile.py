"""A test that measures time has the machine to itself; the others of a run share it."""

import fcntl
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.turnstile import taking_turns

SOON_S, NEVER_S = 20.0, 0.3


def stay(folder: Path, alone: bool, here: Connection) -> None:
    """Say when it comes and when it is in, and go when told to."""
    here.send("comes")
    with taking_turns(folder, alone=alone):
        here.send("in")
        here.recv()
    here.send("out")


@pytest.fixture
def visitor(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    started = []

    def start(*, alone: bool) -> Connection:
        here, there = context.Pipe()
        started.append(context.Process(target=stay, args=(tmp_path, alone, there), daemon=True))
        started[-1].start()
        assert here.poll(SOON_S)
        assert here.recv() == "comes"
        return here

    yield start
    for each in started:
        each.kill()
        each.join()


def stands_in_the_turnstile(folder: Path) -> bool:
    with (folder / "turnstile").open("w") as turnstile:
        try:
            fcntl.flock(turnstile, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def leave(visitor: Connection) -> None:
    visitor.send("leave")
    assert visitor.poll(SOON_S)
    assert visitor.recv() == "out"


def test_two_share_and_one_alone_waits_for_both(visitor) -> None:
    first, second = visitor(alone=False), visitor(alone=False)
    assert first.poll(SOON_S)
    assert second.poll(SOON_S)
    assert (first.recv(), second.recv()) == ("in", "in")
    alone = visitor(alone=True)
    assert not alone.poll(NEVER_S)
    leave(first)
    assert not alone.poll(NEVER_S)
    leave(second)
    assert alone.poll(SOON_S)


def test_nobody_comes_in_before_one_who_waits_to_be_alone(visitor, tmp_path: Path) -> None:
    first = visitor(alone=False)
    assert first.poll(SOON_S)
    assert first.recv() == "in"
    alone = visitor(alone=True)
    while not stands_in_the_turnstile(tmp_path):
        time.sleep(0.01)
    late = visitor(alone=False)
    assert not late.poll(NEVER_S)
    leave(first)
    assert alone.poll(SOON_S)
    assert alone.recv() == "in"
    assert not late.poll(NEVER_S)
    leave(alone)
    assert late.poll(SOON_S)
