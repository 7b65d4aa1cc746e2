"""The supervisor: ranks that end, fail, die or are orphaned. The ranks here load no torch."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from boltmesh.starting.launch import Supervisor, resume_command

RANK = """
import os, signal, sys, time
from pathlib import Path
from boltmesh.starting.rank import Rank
from boltmesh.errors import ConfigError, OffloadError

rank = Rank.enter()
Path(f"pid-{rank.rank}").write_text(str(os.getpid()))
Path(f"ready-{rank.rank}").touch()

def lose_a_peer():
    raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:25009")

def work():
"""


def supervisor(body: str, *, num_ranks: int = 2, **options) -> Supervisor:
    """A supervisor whose ranks run ``body`` in place of a command."""
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    made = Supervisor(["fit", "mine.yaml"], num_ranks=num_ranks, job_id="test", **options)
    made.command = [
        sys.executable,
        "-c",
        f"{RANK}{lines}\n    return 0\nsys.exit(rank.execute(work))",
    ]
    return made


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def wait_for(*paths: Path, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(
        path.exists() and (path.stat().st_size or "pid" not in path.name) for path in paths
    ):
        assert time.monotonic() < deadline, f"not there within {timeout_s} s: {paths}"
        time.sleep(0.02)


def send_when_ready(signum: int, folder: Path, *, times: int = 1) -> threading.Thread:
    def send() -> None:
        wait_for(folder / "ready-0", folder / "ready-1")
        for _ in range(times):
            os.kill(os.getpid(), signum)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_ranks_know_their_place(workplace):
    body = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
Path(f"place-{rank.rank}").write_text(" ".join(os.environ[name] for name in names))
assert os.getsid(0) == os.getpid(), "a session of its own"
"""
    assert supervisor(body, num_ranks=3).run() == 0
    places = [Path(f"place-{rank}").read_text() for rank in range(3)]
    assert places == [f"{rank} {rank} 3 3 0 127.0.0.1" for rank in range(3)]


def test_nobody_can_take_the_port_before_rank_0_serves_it(workplace):
    body = """
import socket
if rank.rank == 0:
    inherited = socket.socket(fileno=int(os.environ["BOLTMESH_RENDEZVOUS_FD"]))
    assert inherited.getsockname()[1] == int(os.environ["MASTER_PORT"])
    time.sleep(0.5)
    inherited.accept()[0].sendall(b"here")
else:
    peer = socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])), timeout=10)
    assert peer.recv(4) == b"here", "a peer that comes early waits in the queue of the socket"
"""
    assert supervisor(body).run() == 0


def test_a_killed_rank_is_named_once_and_the_job_is_over_in_seconds(workplace, capfd):
    body = """
if rank.rank == 1:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.31)
lose_a_peer()
"""
    began = time.monotonic()
    assert supervisor(body, num_ranks=3).run() == 1
    assert time.monotonic() - began < 6
    pid = Path("pid-1").read_text()
    assert capfd.readouterr().err == (
        f"boltmesh: rank 1 (pid {pid}) was killed by signal 9 (SIGKILL); nothing else failed "
        f"before it. Often the system ran out of memory.\n"
    )


def test_a_rank_that_hangs_after_a_failure_is_ended(workplace, capfd):
    body = """
if rank.rank == 0:
    raise ValueError("planted")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
time.sleep(60)
"""
    began = time.monotonic()
    assert supervisor(body).run() == 1
    assert time.monotonic() - began < 8
    assert not alive(int(Path("pid-1").read_text()))
    line = f"boltmesh: rank 0 (pid {Path('pid-0').read_text()}) failed: ValueError: planted"
    assert capfd.readouterr().err == f"{line}; add --traceback to see where\n"


def test_a_failure_is_named_before_its_consequences_whoever_ends_first(workplace, capfd):
    body = """
if rank.rank == 0:
    lose_a_peer()
time.sleep(0.4)
raise KeyError("planted")
"""
    assert supervisor(body).run() == 1
    error = capfd.readouterr().err
    assert error.startswith(f"boltmesh: rank 1 (pid {Path('pid-1').read_text()}) failed: KeyError")
    assert error.count("\n") == 1


def test_ranks_that_all_lost_a_peer_say_so(workplace, capfd):
    assert supervisor("lose_a_peer()").run() == 1
    error = capfd.readouterr().err
    assert "lost a peer, and no rank has said why: RuntimeError: [pair.cc:553]" in error
    assert error.count("\n") == 1


def test_a_mistake_of_the_user_that_every_rank_finds_is_said_once(workplace, capfd):
    assert supervisor("raise ConfigError('a.yaml: wrong. Write right.')", num_ranks=3).run() == 2
    assert capfd.readouterr().err == "boltmesh: a.yaml: wrong. Write right.\n"


def test_a_rank_that_leaves_without_a_word_is_named_with_its_code(workplace, capfd):
    assert supervisor("if rank.rank == 1: os._exit(3)\ntime.sleep(20)").run() == 1
    pid = Path("pid-1").read_text()
    assert capfd.readouterr().err == (
        f"boltmesh: rank 1 (pid {pid}) exited with code 3; nothing else failed before it.\n"
    )


def test_the_traceback_is_kept_in_the_folder_of_the_run(workplace, capfd):
    body = "Path('run').mkdir(exist_ok=True)\nrank.run_folder = Path('run')\n1 / (1 - rank.rank)"
    assert supervisor(body).run() == 1
    error = capfd.readouterr().err
    assert error.endswith("ZeroDivisionError: division by zero; traceback: run/error-rank-1.txt\n")
    assert Path("run/error-rank-1.txt").read_text().startswith("Traceback (most recent call last)")


def test_the_traceback_is_shown_on_request(workplace, capfd):
    assert supervisor("{}['planted']", wants_traceback=True).run() == 1
    error = capfd.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert error.splitlines()[-1].endswith("failed: KeyError: 'planted'")


def test_an_abort_after_the_end_of_the_work_takes_nothing_away(workplace, capfd):
    body = """
import atexit
atexit.register(os.kill, os.getpid(), signal.SIGABRT)
"""
    assert supervisor(body).run() == 0
    assert capfd.readouterr().err == ""


STOPPABLE = """
rank.stop.is_training = True
while rank.stop.signum is None:
    time.sleep(0.01)
from boltmesh.starting.stopping import StoppedBySignal
raise StoppedBySignal(rank.stop.signum, step=41, checkpoint="kept.ckpt")
"""


@pytest.mark.parametrize(
    ("signum", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_is_handed_to_all_ranks_and_the_way_on_is_said(
    workplace, capfd, signum, code, name
):
    thread = send_when_ready(signum, workplace)
    assert supervisor(STOPPABLE).run() == code
    thread.join()
    first, _, last = capfd.readouterr().err.strip().partition("\n")
    assert first.startswith("boltmesh: stopping after this step")
    assert last == (
        f"boltmesh: stopped by {name} after step 41; checkpoint: kept.ckpt; "
        f"go on with: boltmesh fit mine.yaml resume=auto"
    )


def test_a_signal_before_training_ends_the_ranks_at_once(workplace, capfd):
    thread = send_when_ready(signal.SIGINT, workplace)
    began = time.monotonic()
    assert supervisor("time.sleep(60)").run() == 130
    thread.join()
    assert time.monotonic() - began < 5
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last == (
        "boltmesh: stopped by Ctrl-C before the first step; no checkpoint was written for it."
    )


def test_a_second_signal_kills_ranks_that_do_not_stop(workplace, capfd):
    thread = send_when_ready(signal.SIGINT, workplace, times=2)
    began = time.monotonic()
    assert supervisor("rank.stop.is_training = True\nwhile True: time.sleep(1)").run() == 130
    thread.join()
    assert time.monotonic() - began < 5
    assert not any(alive(int(Path(f"pid-{rank}").read_text())) for rank in range(2))
    assert capfd.readouterr().err.strip().splitlines()[-1] == (
        "boltmesh: killed by a second signal; go on with: boltmesh fit mine.yaml resume=auto"
    )


def test_a_failure_while_stopping_is_told_as_a_failure(workplace, capfd):
    body = """
rank.stop.is_training = True
while rank.stop.signum is None:
    time.sleep(0.01)
raise OffloadError("no space left for the checkpoint")
"""
    thread = send_when_ready(signal.SIGINT, workplace)
    assert supervisor(body).run() == 1
    thread.join()
    assert "no space left for the checkpoint" in capfd.readouterr().err


def test_ranks_end_with_a_supervisor_that_is_killed(workplace):
    code = (
        "import sys; from boltmesh.starting.launch import Supervisor\n"
        "made = Supervisor(['fit', 'x'], num_ranks=2, job_id='test')\n"
        f"made.command = [sys.executable, '-c', {RANK + '    time.sleep(60)' + chr(10)!r}\n"
        "                'sys.exit(rank.execute(work))']\n"
        "made.run()\n"
    )
    # Who is killed leaves its folder behind: not in /tmp.
    environment = {**os.environ, "TMPDIR": str(workplace)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    wait_for(Path("pid-0"), Path("pid-1"), Path("ready-0"), Path("ready-1"))
    pids = [int(Path(f"pid-{rank}").read_text()) for rank in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "a rank outlived its supervisor"
        time.sleep(0.02)


def test_a_rank_that_starts_after_its_supervisor_is_gone_ends_at_once(workplace):
    environment = {**os.environ, "BOLTMESH_SUPERVISOR": f"{os.getppid()}:{workplace}"}
    code = "from boltmesh.starting.rank import Rank; Rank.enter(); print('went on')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_the_command_that_continues_a_run_keeps_its_overrides():
    given = ["fit", "my config.yaml", "max_steps=5", "resume=runs/a.ckpt", "--traceback"]
    assert resume_command(given) == "boltmesh fit 'my config.yaml' max_steps=5 resume=auto"
