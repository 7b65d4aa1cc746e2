"""Point to point: to whom and from whom, to the byte; and how far each group has come."""

import pytest
import torch
import torch.distributed as dist

from boltmesh.telemetry import layout
from boltmesh.telemetry.layout import SECTIONS
from boltmesh.telemetry.rank_ranges import pack_ranks, unpack_ranks
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.writer.rank_file import RankFile
from tests.support.ranks import run_ranks
from tests.telemetry.counting import open_counting
from tests.telemetry.test_reader import make_job, make_rank, snapshot, write_status, write_step


def look(rank):
    with open_job("counting") as job:
        return job.snapshot().ranks[rank]


def peers_of(rank):
    return {
        (each.axis, each.operator, each.peer): (each.calls, each.payload_bytes)
        for each in look(rank).peers
    }


def ring_worker(rank, world_size):
    """Send ``rank + 1`` floats around the ring, both ways, singly, batched and from any source."""
    recorder = open_counting(rank, world_size)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    sent, received = torch.ones(rank + 1), torch.empty(before + 1)
    for _ in range(3):
        if rank % 2:
            dist.recv(received, before)
            dist.send(sent, after)
        else:
            dist.send(sent, after)
            dist.recv(received, before)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.ones(10 * (rank + 1)), before),
            dist.P2POp(dist.irecv, torch.empty(10 * (after + 1)), after),
        ]
    )
    for work in works:
        work.wait()
    live = peers_of(rank)
    dist.barrier()
    if rank == 0:
        for _ in range(world_size - 1):
            assert dist.recv(torch.empty(100)) > 0
    else:
        dist.send(torch.ones(100), 0)
    half = dist.new_group([world_size - 2, world_size - 1])
    recorder.name_group(half, "pipeline")
    if rank >= world_size - 2:
        peer = rank ^ 1
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(7), peer, half),
                dist.P2POp(dist.irecv, torch.empty(7), peer, half),
            ]
        )
        for work in works:
            work.wait()
    recorder.close()
    return live, peers_of(rank)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_goes_to_and_comes_from_each_peer_is_counted_to_the_byte(world_size):
    for rank, (live, whole) in enumerate(run_ranks(ring_worker, world_size)):
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        expected: dict[tuple[str, str, int], tuple[int, int]] = {}

        def count(axis, operator, peer, calls, floats, expected=expected):
            was = expected.get((axis, operator, peer), (0, 0))
            expected[axis, operator, peer] = (was[0] + calls, was[1] + 4 * floats)

        count("world", "send", after, 3, 3 * (rank + 1))
        count("world", "recv", before, 3, 3 * (before + 1))
        count("world", "send", before, 1, 10 * (rank + 1))
        count("world", "recv", after, 1, 10 * (after + 1))
        assert live == expected
        if rank == 0:
            for peer in range(1, world_size):
                count("world", "recv", peer, 1, 100)
        else:
            count("world", "send", 0, 1, 100)
        if rank >= world_size - 2:
            count("pipeline", "send", rank ^ 1, 1, 7)
            count("pipeline", "recv", rank ^ 1, 1, 7)
        assert whole == expected


def test_peers_beyond_what_the_ring_holds_stay_exact_and_have_a_mean_per_step():
    file = make_rank(make_job())
    group, send = file.group_number("1", "pipeline"), file.operator_number("send")
    with open_job() as job:
        for number in range(40):
            for peer in (3, 5):
                for _ in range(150):
                    file.enqueue(number + 1, group, send, 2, 0, 100 * peer, peer + 1)
            write_step(file, number)
            if number in {0, 10}:
                job.snapshot()  # a reader that looks in between counts the same
        file.write_counters()
        write_status(file, 1)
        assert SECTIONS["traffic"].capacity < 40 * 300
        for seen in (job.snapshot(), snapshot()):
            found = {
                each.peer: (each.calls, each.payload_bytes, each.bytes_per_step)
                for each in seen.ranks[0].peers
            }
            assert found == {
                3: (6000, 6000 * 300, 150 * 300),
                5: (6000, 6000 * 500, 150 * 500),
            }
    file.close()


def test_a_process_that_goes_on_in_its_file_goes_on_counting_its_peers():
    path = make_job()
    file = make_rank(path)
    group, send = file.group_number("1", "pipeline"), file.operator_number("send")
    file.enqueue(1, group, send, 2, 0, 100, 4)
    file.close()
    file = make_rank(path)
    file.enqueue(1, group, send, 2, 0, 100, 4)
    file.enqueue(1, group, send, 2, 0, 100, 5)
    totals = {each.peer: each.calls for each in snapshot().ranks[0].peers}
    assert totals == {3: 2, 4: 1}
    assert snapshot().ranks[0].groups[0].sequence == 3
    file.close()


def groups_worker(rank, world_size):
    recorder = open_counting(rank, world_size)
    pair = dist.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True)
    recorder.name_group(pair, "tensor")
    named = look(rank).groups
    dist.all_reduce(torch.ones(3), group=pair)
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(3), 0)
    used = look(rank).groups
    dist.barrier()
    recorder.close()
    return named, used


@pytest.mark.full
@pytest.mark.ranks
def test_each_group_tells_its_members_and_how_far_this_rank_has_come():
    for rank, (named, used) in enumerate(run_ranks(groups_worker, 4)):
        (pair,) = named
        first = rank - rank % 2
        assert (pair.axis, pair.ranks) == ("tensor", (first, first + 1))
        assert (pair.sequence, pair.operator, pair.is_done, pair.time) == (0, None, None, None)
        pair, world = used
        assert (pair.sequence, pair.operator, pair.is_done) == (1, "allreduce", True)
        assert (world.axis, world.ranks) == ("world", (0, 1, 2, 3))
        assert (world.sequence, world.operator, world.is_done) == (3, "broadcast", True)
        assert world.time >= pair.time


def test_a_group_whose_newest_collective_left_the_ring_is_still_shown():
    file = make_rank(make_job(world_size=2), world_size=2)
    rare, common = file.group_number("1", "tensor", [0, 1]), file.group_number("2", "data")
    reduce, gather = file.operator_number("allreduce"), file.operator_number("allgather")
    timed = layout.TRAFFIC_IS_TIMED
    file.enqueue(1, rare, gather, 2, timed, 8)
    late = file.enqueue(1, rare, reduce, 2, timed, 8)
    with open_job() as job:
        assert [each.is_done for each in job.snapshot().ranks[0].groups] == [False, None]
        for _ in range(2 * SECTIONS["traffic"].capacity):
            file.complete(file.enqueue(1, common, reduce, 2, timed, 8), 10**15)
        write_status(file, 1)

        def rare_group(seen):
            group = seen.ranks[0].groups[0]
            assert (group.axis, group.ranks, group.sequence) == ("tensor", (0, 1), 2)
            return group.operator, group.is_done

        assert rare_group(job.snapshot()) == rare_group(snapshot()) == ("allreduce", False)
        file.complete(late, 10**15)
        write_status(file, 1)
        assert rare_group(job.snapshot()) == rare_group(snapshot()) == ("allreduce", True)
    file.close()


def test_what_was_done_shortly_before_it_left_the_ring_is_known_to_be_done():
    capacity = SECTIONS["traffic"].capacity
    file = make_rank(make_job())
    rare, common = file.group_number("1", "tensor"), file.group_number("2", "data")
    reduce = file.operator_number("allreduce")
    ticket = file.enqueue(1, rare, reduce, 2, layout.TRAFFIC_IS_TIMED, 8)
    for number in range(2 * capacity):
        file.enqueue(1, common, reduce, 2, 0, 8)
        if number == capacity * 3 // 4:
            file.complete(ticket, 10**15)
    write_status(file, 1)
    group = snapshot().ranks[0].groups[0]
    assert (group.operator, group.is_done) == ("allreduce", True)
    file.close()


@pytest.mark.parametrize(
    ("ranks", "num_runs"),
    [
        ([], 0),
        ([5], 1),
        (list(range(1024)), 1),
        (list(range(3, 1024, 4)), 1),
        ([0, 1, 4, 5, 8, 9], 3),
        ([7, 5, 3, 1], 1),
        ([0, 1, 3, 5, 7], 2),
    ],
    ids=["none", "one", "all", "stride", "blocks", "falling", "mixed"],
)
def test_members_of_a_group_are_written_as_runs(ranks, num_runs):
    runs = pack_ranks(ranks)
    assert unpack_ranks(runs, 1024) == tuple(ranks)
    assert len(runs) == num_runs


@pytest.mark.parametrize(
    "run", [(0, 10**9, 1), (0, 0, 1), (-5, 3, 1), (0, 3, -1), (0, 3, 0), (1000, 100, 1)]
)
def test_members_that_cannot_be_are_not_believed(run):
    assert unpack_ranks([run], 1024) == ()


def test_members_without_end_do_not_fill_the_names(tmp_path):
    file = RankFile(tmp_path / "rank-0.bin", rank=0, world_size=10_000)
    for number in range(20):
        square = [each * each % 9973 for each in range(1000)]
        file.group_number(str(number), "data", square)
    assert file.is_open
    file.close()
