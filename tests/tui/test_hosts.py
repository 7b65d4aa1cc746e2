"""A job of several hosts, put together; and what ssh says, in one line."""

import os
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from boltmesh.errors import ConfigError, TelemetryError
from boltmesh.telemetry.reader.reader import JobSummary
from boltmesh.telemetry.snapshot import Event
from boltmesh.tui.commands import targets
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.sources.ssh import hosts as hosts_module
from boltmesh.tui.sources.ssh.hosts import LIST_AGAIN_S, Hosts, HostsSource, HostView, merge
from boltmesh.tui.sources.ssh.remote import Remote, explain
from tests.tui.samples import NOW, FakeSource, job, rank, summary

REMOTES = (Remote("node1"), Remote("node2"))


def look_of(number: int, *, lost: str | None = None, **changes: object) -> HostView:
    """What host ``number`` of two shows: its own rank in full, the other one in short."""
    ranks = tuple(
        rank(
            each,
            host=f"host{each}",
            is_summary=each != number,
            steps=rank(each).steps if each == number else (),
            last_seen=NOW + number,
        )
        for each in range(2)
    )
    devices = (DeviceReading("process", (number,), f"host{number}", pid=number),)
    snapshot = job(ranks=ranks, **changes)
    return HostView(Observation(NOW + number, snapshot, devices), lost)


def test_each_rank_is_as_its_own_host_has_it() -> None:
    seen = merge([look_of(0), look_of(1)])
    assert [(each.rank, each.is_summary, len(each.steps)) for each in seen.job.ranks] == [
        (0, False, 10),
        (1, False, 10),
    ]
    assert [each.pid for each in seen.devices] == [0, 1]
    assert seen.time == NOW


def test_a_rank_of_a_lost_host_is_as_another_one_heard_of_it() -> None:
    seen = merge([look_of(0), look_of(1, lost="disconnected 3 s")])
    assert [each.is_summary for each in seen.job.ranks] == [False, True]
    assert [each.error for each in seen.job.ranks] == [None, None]
    assert [each.pid for each in seen.devices] == [0]


def test_a_rank_of_which_nobody_else_heard_keeps_its_last_data_and_says_why() -> None:
    alone = msgspec.structs.replace(rank(0), state="missing")
    first = HostView(Observation(NOW, job(ranks=(rank(0), msgspec.structs.replace(alone, rank=1)))))
    seen = merge([first, look_of(1, lost="disconnected 3 s")])
    assert seen.job.ranks[1].error == "disconnected 3 s"
    assert len(seen.job.ranks[1].steps) == 10


def test_the_whole_job_is_told_by_the_host_of_the_first_rank_that_is_not_lost() -> None:
    seen = merge([look_of(1, name="second"), look_of(0, name="first")])
    assert seen.job.name == "first"
    seen = merge([look_of(1, name="second"), look_of(0, name="first", lost="gone")])
    assert seen.job.name == "second"


def test_a_job_has_one_start_whichever_host_is_lost() -> None:
    """Viewers forget curves when it changes, and each host writes its own a little later."""
    for lost in ((None, None), ("gone", None), (None, "gone")):
        looks = [look_of(at, lost=lost[at], started=NOW + at) for at in range(2)]
        assert merge(looks).job.started == NOW + 1


def test_the_worst_state_counts_and_its_cause_is_not_a_consequence() -> None:
    lost_peer = look_of(0, state="failed", cause="rank 0 failed: Connection closed by peer")
    boom = look_of(1, state="failed", cause="rank 1 failed: ValueError: boom")
    assert merge([lost_peer, boom]).job.cause == boom.seen.job.cause
    assert merge([look_of(0), boom]).job.state == "failed"
    assert merge([look_of(0, state="finished"), look_of(1)]).job.state == "running"
    assert merge([look_of(0), look_of(1)]).job.cause is None


def test_events_of_all_hosts_stand_in_their_order_once() -> None:
    both = Event(NOW + 1, 0, "warning", "both")
    own = [Event(NOW + 2 - number, number, "start", "x") for number in range(2)]
    seen = merge([look_of(number, events=(own[number], both)) for number in range(2)])
    assert len(seen.job.events) == 3
    assert [event.time for event in seen.job.events] == [NOW + 1, NOW + 1, NOW + 2]


class Named(FakeSource):
    """Notes which job was asked for."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def __init__(self, remote: Remote, job_id: str | None = None) -> None:
        number = int(remote.host[-1]) - 1
        self.asked.append((remote.host, job_id))
        super().__init__(look_of(number).seen)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[Named]:
    made: list[Named] = []

    def make(remote: Remote, job_id: str | None = None) -> Named:
        made.append(Named(remote, job_id))
        return made[-1]

    Named.asked = []
    monkeypatch.setattr(hosts_module, "SshSource", make)
    return made


def test_the_first_host_decides_which_job_it_is(sources: list[Named]) -> None:
    source = HostsSource(REMOTES)
    source.read()
    assert Named.asked == [("node1", None), ("node2", "abc123")]
    source.close()
    assert [each.is_closed for each in sources] == [True, True]


def test_one_lost_host_does_not_end_it_and_all_do(sources: list[Named]) -> None:
    source = HostsSource(REMOTES)
    source.read()
    sources[1].lost = "node2 is gone"
    assert [each.is_summary for each in source.read().job.ranks] == [False, True]
    sources[0].lost = "node1 is gone"
    with pytest.raises(TelemetryError, match="node1 is gone"):
        source.read()
    sources[1].lost = None
    assert [each.is_summary for each in source.read().job.ranks] == [True, False]


def test_a_host_that_has_no_such_job_is_an_error_to_begin_with(sources: list[Named]) -> None:
    source = HostsSource(REMOTES)
    sources[0].lost = "node1: there is no job"
    with pytest.raises(TelemetryError, match="no job"):
        source.read()
    sources[0].lost = None
    assert source.read().job.id == "abc123"


def test_jobs_are_not_listed_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [[summary(1)], TelemetryError("cut"), [summary(2)]]
    now = 0.0

    def answer(remote: Remote) -> object:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(hosts_module, "list_remote_jobs", answer)
    hosts = Hosts(REMOTES, clock=lambda: now)
    assert [each.id for each in hosts.list_jobs()] == ["job1"]
    assert [each.id for each in hosts.list_jobs()] == ["job1"]
    now = LIST_AGAIN_S
    assert [each.id for each in hosts.list_jobs()] == ["job1"]
    now = 2 * LIST_AGAIN_S
    assert [each.id for each in hosts.list_jobs()] == ["job2"]
    answers.append(TelemetryError("cut"))
    with pytest.raises(TelemetryError):
        Hosts(REMOTES).list_jobs()


BANNER = "*** Authorized use only ***\n\n"


@pytest.mark.parametrize(
    ("exit_code", "stderr", "told", "is_final"),
    [
        (255, "me@node: Permission denied (publickey).", "node refuses the login", True),
        (255, "Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures",
         "node refuses the login", True),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
         "the key of node is not the one", True),
        (255, "No ED25519 host key is known for node.\nHost key verification failed.",
         "the key of node is not known here", True),
        (255, "ssh: Could not resolve hostname node: Name or service not known",
         "there is no host node", False),
        (255, "/home/me/.ssh/config: line 3: Bad configuration option: usr",
         "ssh does not start", True),
        (255, "ssh: connect to host node port 22: No route to host",
         "node cannot be reached", False),
        (255, "Connection to node closed by remote host.", "node cannot be reached", False),
        (255, "", "node cannot be reached (", False),
        (127, "boltmesh is not found", "node has no boltmesh", True),
        (127, "bash: line 1: boltmesh: command not found", "node has no boltmesh", True),
        (126, "sh: /x/boltmesh: Permission denied", "node has no boltmesh", True),
        (1, "/usr/bin/python3: No module named boltmesh", "node has no boltmesh", True),
        (2, "Usage: boltmesh\nError: No such command 'stream'.", "is too old", True),
        (1, "Traceback\nImportError: libx.so", "(exit code 1): ImportError: libx.so", True),
        (0, "", "the connection to node was lost", False),
        (137, "Killed", "the connection to node was lost", False),
        (-15, "", "the connection to node was lost", False),
        (None, "", "the connection to node was lost", False),
    ],
)  # fmt: skip
def test_what_ssh_says_is_one_line(
    exit_code: int | None, stderr: str, told: str, is_final: bool
) -> None:
    error = explain("node", exit_code, BANNER + stderr + "\n")
    assert told in str(error)
    assert error.is_final is is_final
    assert "\n" not in str(error)


def test_what_ssh_says_cannot_steer_a_terminal() -> None:
    assert "\x1b" not in str(explain("node", 255, "\x1b[2J\x07 Permission denied"))


def _script(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a SLURM into the PATH that has job 4711 on two nodes, and another on one of them."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    jobs = 'case "$*" in *4711*) echo "n[1-2]";; *--me*) echo "n[1-2]"; echo n2;; esac'
    _script(tmp_path, "squeue", f'{jobs}; case "$*" in *RUNNING*) ;; *) exit 1;; esac')
    _script(tmp_path, "scontrol", 'echo "$3" | sed "s/n\\[1-2\\]/n1,n2/" | tr , "\\n"')
    return tmp_path


def test_hosts_are_those_of_a_slurm_job(slurm: Path) -> None:
    assert hosts_module.slurm_hosts("4711") == ("n1", "n2")
    assert hosts_module.slurm_hosts() == ("n1", "n2")
    with pytest.raises(ConfigError, match="does not list a running job 12"):
        hosts_module.slurm_hosts("12")
    _script(slurm, "scontrol", "echo 'scontrol: error: invalid' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"scontrol: error: invalid.* --ssh instead"):
        hosts_module.slurm_hosts("4711")


def test_jobs_of_all_hosts_are_one_list(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {"n1": [summary(1), summary(3)], "n2": [summary(3), summary(2)], "n0": None}

    def list_jobs(place: Hosts) -> list[JobSummary]:
        jobs = lists[place.name]
        if jobs is None:
            raise TelemetryError("n0 does not answer")
        return jobs

    monkeypatch.setattr(targets, "list_jobs", list_jobs)
    found = targets.list_slurm_jobs(("n0",), None, None)
    assert sorted(each.id for each in found) == ["job1", "job2", "job3"]
