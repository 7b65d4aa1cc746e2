"""What it costs to watch: a thousand ranks, an hour, several readers at once."""

import gc
import resource
import threading
import time
import tracemalloc

import pytest

from boltmesh.telemetry import layout
from boltmesh.telemetry.reader import job_reader, rank_reader
from boltmesh.telemetry.reader.job_reader import RANKS_A_LOOK, STILL_RANKS_A_LOOK, JobReader
from boltmesh.telemetry.reader.rank_reader import RankReader
from boltmesh.telemetry.reader.reader import open_job
from tests.telemetry.test_reader import make_job, make_rank, write_status, write_step

NUM_RANKS = 1024
STEADY_S = 0.4
"""CPU that a look at a thousand ranks may take when few of them have moved. It is about 0.04 on the
machine of the benchmarks; a reader that read whole files took 9."""


class Ranks:
    """Files of many ranks, written by this process."""

    def __init__(self, path, number):
        self.step = 0
        self._files = []
        for rank in range(number):
            file = make_rank(path, rank, world_size=number)
            group = file.group_number("d", "data", range(number))
            self._files.append((file, group, file.operator_number("allreduce")))

    def advance(self, which, num_steps=1):
        """Take steps of three collectives on some of the ranks."""
        for file, group, operator in self._files[which]:
            for number in range(num_steps):
                for _ in range(3):
                    flags = layout.TRAFFIC_IS_TIMED
                    ticket = file.enqueue(self.step + number + 1, group, operator, 3, flags, 1000)
                    file.complete(ticket, time.monotonic_ns())
                write_step(file, self.step + number, loss=0.5)
            file.point("loss", self.step, 0.5)
            file.write_counters()
            write_status(file, 1, self.step + num_steps)
        self.step += num_steps

    def close(self):
        for file, _, _ in self._files:
            file.close()


@pytest.fixture
def many_files():
    """Allow the writers of this process their descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * NUM_RANKS + 1000  # a mapping keeps a descriptor of its own
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files, and {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def cpu_of(call):
    begin = time.process_time()
    result = call()
    return time.process_time() - begin, result


@pytest.mark.full
@pytest.mark.slow(25)
def test_a_thousand_ranks_are_watched_by_a_small_part_of_a_core(many_files, monkeypatch):
    monkeypatch.setattr(rank_reader, "most_open", lambda: 600)
    ranks = Ranks(make_job(world_size=NUM_RANKS, mesh={"data": NUM_RANKS}), NUM_RANKS)
    ranks.advance(slice(None), 5)
    opened = RankReader.num_open
    with open_job() as job:
        first = job.snapshot()
        assert all(len(rank.steps) == 5 for rank in first.ranks)
        for _ in range(NUM_RANKS // RANKS_A_LOOK):
            first = job.snapshot()
        assert all(rank.groups[0].ranks == tuple(range(NUM_RANKS)) for rank in first.ranks[::99])
        assert RankReader.num_open == 600  # the others are opened at each look
        costs = []
        for _ in range(6):
            ranks.advance(slice(100))
            cost, seen = cpu_of(job.snapshot)
            costs.append(cost)
            assert seen.ranks[99].global_step == ranks.step
        assert seen.ranks[100] is first.ranks[100]  # nothing was made anew for it
        for _ in range(NUM_RANKS // RANKS_A_LOOK):
            seen = job.snapshot()
        assert {rank.collectives[0].calls for rank in seen.ranks[:100]} == {3 * ranks.step}
    ranks.close()
    assert RankReader.num_open == opened
    assert min(costs) < STEADY_S


@pytest.mark.full
@pytest.mark.slow(25)
def test_an_hour_of_looking_takes_no_more_memory_than_its_first_minutes():
    """A look a second at a rank whose steps take three seconds, and whose rings are full."""
    ranks = Ranks(make_job(), 1)
    for _ in range(3000):
        ranks.advance(slice(None))
    tracemalloc.start(1)
    try:
        with open_job() as job:
            held = []
            for second in range(3600):
                if second % 3 == 0:
                    ranks.advance(slice(None))
                job.snapshot()
                if second in {300, 3599}:
                    gc.collect()
                    held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    ranks.close()
    early, late = held
    assert early > 500_000  # it holds a ring of steps
    assert late - early < 300_000  # of eleven hundred steps, the records alone are three times that


def test_half_of_the_descriptors_that_a_process_may_have_stay_free(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert rank_reader.most_open() == 512
    monkeypatch.setattr(resource, "getrlimit", lambda _: (-1, -1))
    assert rank_reader.most_open() > 10_000


@pytest.mark.full
def test_several_readers_see_the_same_while_a_rank_writes():
    path = make_job()
    ranks = Ranks(path, 1)
    stop = threading.Event()
    problems: list[str] = []
    looks = [0] * 4

    def watch(number):
        with JobReader(path) as job:
            while not stop.is_set():
                seen = job.snapshot().ranks[0]
                looks[number] += 1
                calls = sum(each.calls for each in seen.collectives)
                if seen.skipped_records or calls > 3 * 600 or seen.state != "running":
                    problems.append(f"{seen.skipped_records} {calls} {seen.state}")
            seen = job.snapshot().ranks[0]
            if [each.global_step for each in seen.steps] != list(range(1, 601)):
                problems.append("a step is missing")
            if [each.calls for each in seen.collectives] != [1800]:
                problems.append(f"{seen.collectives}")

    watchers = [threading.Thread(target=watch, args=(number,)) for number in range(4)]
    for each in watchers:
        each.start()
    for step in range(600):
        ranks.advance(slice(None))
        time.sleep(0.001)
        while min(looks) < step // 100:  # all of them look between these steps and those
            time.sleep(0.001)
    stop.set()
    for each in watchers:
        each.join()
    ranks.close()
    assert problems == []


def test_ranks_that_stand_still_have_their_turn_before_others(monkeypatch):
    num_ranks = 272
    monkeypatch.setattr(job_reader, "STILL_S", 0.0)
    ranks = Ranks(make_job(world_size=num_ranks, mesh={"data": num_ranks}), num_ranks)
    ranks.advance(slice(None), 6)
    with open_job() as job:
        job.snapshot()
        for _ in range(-(-num_ranks // STILL_RANKS_A_LOOK)):
            seen = job.snapshot()
    ranks.close()
    assert {rank.groups[0].sequence for rank in seen.ranks} == {3 * ranks.step}


def test_a_rank_that_was_left_behind_is_caught_up_with_by_its_newest_steps(monkeypatch):
    monkeypatch.setattr(job_reader, "RANKS_IN_TURN", 1)
    monkeypatch.setattr(job_reader, "RANKS_A_LOOK", 0)
    monkeypatch.setattr(job_reader, "STILL_RANKS_A_LOOK", 0)
    monkeypatch.setattr(job_reader, "MANY_RANKS", 1)
    ranks = Ranks(make_job(world_size=2), 2)
    ranks.advance(slice(None), 6)
    with open_job() as job:
        job.snapshot()
        ranks.advance(slice(None), 200)
        assert job.snapshot().ranks[0].collectives == ()
        monkeypatch.setattr(job_reader, "RANKS_A_LOOK", 2)
        seen = job.snapshot().ranks[0]
        read = job._ranks[0].reader.traffic.ring.records
        assert len(read) < job_reader.BRIEF_STEPS * 3 + 64 < 3 * 200
        (total,) = seen.collectives
        assert (total.calls, total.calls_per_step) == (3 * ranks.step, 3.0)
        ranks.advance(slice(None), 100)
        (total,) = job.snapshot().ranks[0].collectives
        assert (total.calls, total.calls_per_step) == (3 * ranks.step, 3.0)
    ranks.close()
