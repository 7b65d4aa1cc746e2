"""Ranks of other hosts: told through the job's store, shown as what they are, never waited for."""

import contextlib
import os
import time
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from boltmesh.telemetry.reader.nodes_view import SILENT_S, NodesView
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.writer import nodes as nodes_module
from boltmesh.telemetry.writer.nodes import (
    NODES_FILE,
    NodeExchange,
    NodeSummary,
    RankSummary,
    ReceivedNode,
    ReceivedNodes,
)
from boltmesh.torch_compat import job_store
from tests.support.written_jobs import WrittenJob


class Clock:
    """Stands until it is moved."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Node:
    """A host of a job of four ranks, two on each, with a folder of its own."""

    def __init__(self, folder, number, store, clock, *, world_size=4):
        self.job = WrittenJob(
            folder, world_size=world_size, ranks=(2 * number, 2 * number + 1), host=f"host{number}"
        )
        self.said: list[str] = []
        self.exchange = NodeExchange(
            self.job.path,
            rank=2 * number,
            world_size=world_size,
            find_store=lambda: store,
            say=self.said.append,
            clock=clock,
        )

    def snapshot(self):
        with open_job(self.job.path) as job:
            return job.snapshot()

    def ranks(self):
        return [(rank.rank, rank.state, rank.global_step) for rank in self.snapshot().ranks]

    def close(self):
        self.exchange.end()
        self.job.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store():
    return PrefixStore("test", HashStore())


@pytest.fixture
def nodes(tmp_path, store, clock, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "told")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                contextlib.closing(Node(tmp_path / f"run{number}", number, store, clock))
            )
            for number in range(2)
        ]


def exchange(nodes, clock, *, times=2):
    """Let each host have its turns; what the last one told is heard a turn later."""
    for _ in range(times):
        clock.now += 60
        for node in nodes:
            node.exchange.after_step()


def test_each_host_shows_the_ranks_of_both(nodes, clock):
    assert nodes[0].ranks() == [
        (0, "running", 1),
        (1, "running", 1),
        (2, "missing", 0),
        (3, "missing", 0),
    ]
    nodes[1].job.step()
    exchange(nodes, clock)
    assert nodes[0].ranks() == [
        (0, "running", 1),
        (1, "running", 1),
        (2, "running", 2),
        (3, "running", 2),
    ]
    assert nodes[1].ranks() == nodes[0].ranks()
    seen = nodes[0].snapshot()
    assert [rank.is_summary for rank in seen.ranks] == [False, False, True, True]
    told = seen.ranks[3]
    assert (told.host, told.device, told.coordinates) == ("told", "cpu", {"data": 3})
    assert (told.phase, told.steps, told.collectives) == ("forward", (), ())
    assert told.memory.host_rss_bytes == 1003
    assert told.last_seen == pytest.approx(time.time(), abs=30)
    assert (seen.state, seen.global_step) == ("running", 2)
    assert nodes[0].said == []


def test_a_summary_is_told_about_once_a_second_and_no_more(nodes, clock, store):
    exchange(nodes, clock)
    before = store.multi_get(["node-0"])
    nodes[0].job.step()
    clock.now += 0.5
    nodes[0].exchange.after_step()
    assert store.multi_get(["node-0"]) == before
    clock.now += nodes_module.EVERY_S
    nodes[0].exchange.after_step()
    assert store.multi_get(["node-0"]) != before


def test_a_slow_store_is_asked_more_rarely(tmp_path, clock):
    class Slow:
        def __getattr__(self, name):
            clock.now += 0.01
            return getattr(real, name)

    real = HashStore()
    with contextlib.closing(Node(tmp_path, 0, Slow(), clock)) as node:
        node.exchange.after_step()
        assert node.exchange.interval_s == pytest.approx(200 * 0.03, rel=0.5)
        assert node.exchange.is_on


def test_a_store_that_hangs_for_long_is_left_alone(tmp_path, clock):
    class Hanging:
        def __getattr__(self, name):
            clock.now += 5
            return getattr(real, name)

    real = HashStore()
    with contextlib.closing(Node(tmp_path, 0, Hanging(), clock)) as node:
        node.exchange.after_step()
        assert not node.exchange.is_on
        assert node.said == [
            "ranks of other hosts are no longer heard of: the job's store took 15.0 s to answer"
        ]


def test_the_first_failure_is_the_last(nodes, clock, monkeypatch):
    exchange(nodes, clock)
    calls = []

    def fail():
        calls.append(1)
        raise RuntimeError("Connection reset by peer\nwith a long trace")

    monkeypatch.setattr(nodes[0].exchange, "_find_store", fail)
    for _ in range(3):
        clock.now += 60
        nodes[0].exchange.after_step()
    assert len(calls) == 1
    assert nodes[0].said == [
        "ranks of other hosts are no longer heard of: RuntimeError: Connection reset by peer"
    ]
    assert nodes[0].ranks()[3] == (3, "running", 1)


def test_a_host_that_has_set_nothing_is_not_waited_for(nodes, clock, store):
    store.add("nodes", 1)  # somebody who died before its first word
    began = time.monotonic()
    exchange(nodes, clock)
    assert time.monotonic() - began < 60  # a store waits for a key for five minutes
    assert nodes[1].ranks()[0] == (0, "running", 1)


def test_ranks_that_are_all_here_need_no_store(tmp_path, clock):
    def never():
        raise AssertionError("asked")

    with contextlib.closing(Node(tmp_path, 0, None, clock, world_size=2)) as node:
        node.exchange._find_store = never
        node.exchange.after_step()
        assert not node.exchange.is_on
        assert not (node.job.path / NODES_FILE).exists()


def test_without_a_store_nothing_is_told_and_nothing_said(tmp_path, clock):
    with contextlib.closing(Node(tmp_path, 0, None, clock)) as node:
        node.exchange.after_step()
        assert (node.exchange.is_on, node.said) == (True, [])


def test_how_a_host_ended_is_told(nodes, clock):
    exchange(nodes, clock)
    nodes[1].job.end("finished")
    nodes[1].exchange.end()
    exchange(nodes[:1], clock)
    assert nodes[0].ranks()[2:] == [(2, "finished", 1), (3, "finished", 1)]
    nodes[0].job.end("finished")
    assert nodes[0].snapshot().state == "finished"


def test_a_failure_elsewhere_is_the_cause(nodes, clock):
    exchange(nodes, clock)
    nodes[1].job.end("failed", message="ValueError: boom")
    nodes[1].exchange.end()
    exchange(nodes[:1], clock)
    seen = nodes[0].snapshot()
    assert seen.state == "failed"
    assert seen.cause == "rank 2 failed in forward after step 1: ValueError: boom"


def test_who_lost_a_peer_does_not_ask_the_store(nodes, clock, store):
    exchange(nodes, clock)
    before = store.multi_get(["node-1"])
    nodes[1].job.step()
    nodes[1].exchange.end(is_heard=False)
    assert store.multi_get(["node-1"]) == before


def test_a_host_that_is_silent_while_steps_go_on_is_missing(nodes, clock):
    exchange(nodes, clock)
    heard = read_heard(nodes[0].job.path)
    later = heard.looked + SILENT_S + 3 * heard.interval_s + 1
    write_heard(nodes[0].job.path, msgspec.structs.replace(heard, looked=later))
    rank = nodes[0].snapshot().ranks[2]
    assert (rank.state, rank.global_step, rank.host) == ("missing", 1, "told")
    assert rank.error.startswith("told is not heard of for ")
    assert rank.samples_per_second is None
    assert nodes[0].snapshot().state == "running"


def test_silence_while_nothing_moves_here_says_nothing(nodes, clock):
    before = nodes[0].snapshot().ranks
    exchange(nodes, clock)
    view = NodesView(nodes[0].job.path, clock=lambda: time.time() + 3600)
    assert [rank.state for rank in view.fill(before)] == ["running"] * 4


def test_ranks_elsewhere_are_missing_when_nobody_here_listens(nodes, clock):
    exchange(nodes, clock)
    heard = read_heard(nodes[0].job.path)
    write_heard(
        nodes[0].job.path,
        msgspec.structs.replace(
            heard,
            looked=time.time() - 3600,
            note="RuntimeError: gone",
            nodes=tuple(ReceivedNode(time.time() - 3600, each.content) for each in heard.nodes),
        ),
    )
    rank = nodes[0].snapshot().ranks[2]
    assert rank.state == "missing"
    assert rank.error.endswith("RuntimeError: gone.")


def test_when_the_ranks_here_are_gone_those_elsewhere_are_not_known(nodes, clock):
    exchange(nodes, clock)
    nodes[0].job.close()
    ranks = nodes[0].snapshot().ranks
    assert [rank.state for rank in ranks] == ["dead", "dead", "missing", "missing"]
    assert ranks[2].error == "told is not heard of since the ranks here have ended."


def test_a_file_here_says_more_than_what_was_heard(nodes, clock):
    exchange(nodes, clock)
    heard = read_heard(nodes[0].job.path)
    liar = NodeSummary(
        host="liar",
        time=time.time(),
        interval_s=1.0,
        ranks=(RankSummary(rank=0, state="failed", error="boom"),),
    )
    write_heard(
        nodes[0].job.path,
        msgspec.structs.replace(
            heard, nodes=(ReceivedNode(time.time(), msgspec.msgpack.encode(liar)),)
        ),
    )
    assert nodes[0].ranks()[0] == (0, "running", 1)
    assert nodes[0].snapshot().state == "running"


def test_clocks_that_are_apart_do_not_make_a_rank_old(nodes, clock):
    exchange(nodes, clock)
    heard = read_heard(nodes[0].job.path)
    told = msgspec.msgpack.decode(heard.nodes[0].content, type=NodeSummary)
    shifted = msgspec.structs.replace(
        told,
        time=told.time - 7200,
        ranks=tuple(
            msgspec.structs.replace(each, last_seen=each.last_seen - 7200) for each in told.ranks
        ),
    )
    content = msgspec.msgpack.encode(shifted)
    write_heard(
        nodes[0].job.path,
        msgspec.structs.replace(heard, nodes=(ReceivedNode(heard.nodes[0].received, content),)),
    )
    assert nodes[0].snapshot().ranks[2].last_seen == pytest.approx(time.time(), abs=30)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xc1", b"\x91" * 5000, os.urandom(64), b"\x80"],
    ids=["empty", "no type", "deep", "random", "cut"],  # of each worker the same
)
def test_a_file_that_is_none_is_passed_over(nodes, clock, content):
    exchange(nodes, clock)
    path = nodes[0].job.path
    heard = read_heard(path)
    (path / NODES_FILE).write_bytes(content)
    assert nodes[0].ranks()[2] == (2, "missing", 0)
    write_heard(path, msgspec.structs.replace(heard, nodes=(ReceivedNode(1.0, content),)))
    assert nodes[0].ranks()[2] == (2, "missing", 0)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 4},
        {"rank": -1},
        {"global_step": -1},
        {"global_step": 2**62},
        {"pid": -5},
        {"last_seen": float("nan")},
        {"samples_per_second": float("inf")},
        {"coordinates": {"data": -3}},
    ],
)
def test_numbers_that_no_rank_has_are_not_believed(nodes, clock, change):
    exchange(nodes, clock)
    fields = {"rank": 2} | change
    told = NodeSummary(host="h", time=time.time(), interval_s=1.0, ranks=(RankSummary(**fields),))
    heard = read_heard(nodes[0].job.path)
    write_heard(
        nodes[0].job.path,
        msgspec.structs.replace(
            heard, nodes=(ReceivedNode(time.time(), msgspec.msgpack.encode(told)),)
        ),
    )
    assert nodes[0].ranks()[2] == (2, "missing", 0)


def test_text_from_elsewhere_is_cleaned(nodes, clock):
    exchange(nodes, clock)
    told = NodeSummary(
        host="a\x1b[2Jb",
        time=time.time(),
        interval_s=1.0,
        ranks=(RankSummary(rank=2, device="\x07x", state="failed", error="e\nf"),),
    )
    heard = read_heard(nodes[0].job.path)
    write_heard(
        nodes[0].job.path,
        msgspec.structs.replace(
            heard, nodes=(ReceivedNode(time.time(), msgspec.msgpack.encode(told)),)
        ),
    )
    rank = nodes[0].snapshot().ranks[2]
    assert (rank.host, rank.device, rank.error) == ("ab", "x", "e f")


def test_the_file_is_private_and_written_whole(nodes, clock):
    exchange(nodes, clock)
    path = nodes[0].job.path
    assert (path / NODES_FILE).stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.iterdir() if each.name.startswith(".")] == []


def test_the_store_of_a_job_is_found_unless_it_is_a_file(tmp_path):
    assert job_store("x", in_memory=True) is None
    real = HashStore()
    dist.init_process_group("gloo", store=real, rank=0, world_size=1)
    try:
        found = job_store("x", in_memory=True)
        found.set("key", "value")
        assert job_store("x", in_memory=True).multi_get(["key"]) == [b"value"]
        assert not job_store("y", in_memory=True).check(["key"])
    finally:
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert job_store("x", in_memory=True) is None
        assert job_store("x") is not None
    finally:
        dist.destroy_process_group()


def read_heard(path: Path) -> ReceivedNodes:
    return msgspec.msgpack.decode((path / NODES_FILE).read_bytes(), type=ReceivedNodes)


def write_heard(path: Path, heard: ReceivedNodes) -> None:
    (path / NODES_FILE).write_bytes(msgspec.msgpack.encode(heard))
    (path / NODES_FILE).chmod(0o600)


def test_a_run_that_begins_anew_under_the_same_id_forgets_the_hosts_of_the_one_before(nodes, clock):
    exchange(nodes, clock)
    path = nodes[0].job.path
    with open_job(path) as viewer:
        assert [rank.is_summary for rank in viewer.snapshot().ranks] == [False, False, True, True]
        (path / NODES_FILE).unlink()
        assert not any(rank.is_summary for rank in viewer.snapshot().ranks)
