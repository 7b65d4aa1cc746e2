"""Ranks of tests begin as ranks of a launcher do, only sooner."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.ranks import JOINS, PRELOAD, RankFailure, reuse_ranks, run_ranks
from tests.support.scripts import wait_until_gone

pytestmark = pytest.mark.ranks


def look(rank, world_size):
    server = Path("/proc", str(os.getppid()), "task")
    missing = [name for name in PRELOAD if name not in sys.modules]
    return os.getppid(), len(list(server.iterdir())), missing, gc.get_freeze_count()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs the /proc of Linux")
def test_they_come_from_a_process_that_has_imported_and_done_nothing_else():
    for server, num_threads, missing, num_frozen in run_ranks(look, 2):
        assert server != os.getpid()
        assert num_threads == 1
        assert missing == []
        assert num_frozen > 100_000  # what torch alone brings


def fail_or_wait(rank, world_size):
    if rank == 1:
        raise ValueError("planted")


def test_a_failure_is_told_with_its_rank_first():
    with pytest.raises(RankFailure, match=r"^rank 1: (?s:.*)ValueError: planted"):
        run_ranks(fail_or_wait, 2)


def own_rank(rank, world_size):
    return rank


@pytest.mark.sample("2")
@pytest.mark.parametrize("times", [JOINS - 1, JOINS])
def test_ranks_that_gloo_cannot_connect_are_started_again(times, monkeypatch):
    run_once = ranks._run_once
    left = iter([True] * times)

    def unconnected_first(*given):
        started = run_once(*given)
        if next(left, False):
            started[0].error, started[0].is_unconnected = "connectFullMesh failed", True
        return started

    monkeypatch.setattr(ranks, "_run_once", unconnected_first)
    if times < JOINS:
        assert run_ranks(own_rank, 2) == [0, 1]
    else:
        with pytest.raises(RankFailure, match="connectFullMesh failed"):
            run_ranks(own_rank, 2)


def sets_a_variable(rank, world_size, value):
    before = os.environ.get("LEFT_BY_A_TEST")
    os.environ["LEFT_BY_A_TEST"] = value
    return os.getpid(), before


def test_ranks_that_stay_take_one_worker_after_the_other_with_the_environment_of_the_first():
    first, second = (reuse_ranks(sets_a_variable, 2, each) for each in "ab")
    assert first == second
    assert {before for _, before in second} == {None}


def test_a_failure_ends_ranks_that_stay_and_the_next_call_starts_others():
    before = {pid for pid, _ in reuse_ranks(sets_a_variable, 2, "a")}
    with pytest.raises(RankFailure, match=r"^rank 1: (?s:.*)ValueError: planted"):
        reuse_ranks(fail_or_wait, 2)
    assert before.isdisjoint(pid for pid, _ in reuse_ranks(sets_a_variable, 2, "b"))


@pytest.mark.full
def test_so_does_a_rank_that_was_killed_meanwhile():
    before = [pid for pid, _ in reuse_ranks(sets_a_variable, 2, "a")]
    os.kill(before[1], signal.SIGKILL)
    assert wait_until_gone(before[1], 20)
    assert set(before).isdisjoint(pid for pid, _ in reuse_ranks(sets_a_variable, 2, "b"))
