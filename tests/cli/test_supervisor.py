"""The supervisor: ranks that end, fail, die or are orphaned. The ranks here load no torch."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from boltmesh.launch import supervisor as module
from boltmesh.launch.supervisor import Supervisor, resume_command
from boltmesh.process import ProcessId
from boltmesh.rank_reports import make_report_folder, report_of_error, store_traceback
from boltmesh.telemetry.job import JobInfo, job_path, make_private_folder, read_end, write_job

RANK = """
import os, signal, sys, time
from pathlib import Path
from boltmesh.launch.rank import Rank
from boltmesh.errors import ConfigError, OffloadError

rank = Rank.attach()
Path(f"pid-{rank.rank}").write_text(str(os.getpid()))

def touch(name):
    Path(f"{name}-{rank.rank}").touch()

def lose_a_peer():
    raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:25009")

def wait_for(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)

def work():
"""


def supervisor(body: str, *, num_ranks: int = 2, **options) -> Supervisor:
    """A supervisor whose ranks run ``body`` in place of a command."""
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    made = Supervisor(["fit", "mine.yaml"], num_ranks=num_ranks, job_id="test", **options)
    made.command = [
        sys.executable,
        "-c",
        f"{RANK}{lines}\n    return 0\nsys.exit(rank.run(work))",
    ]
    return made


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(*paths: Path, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"not there within {timeout_s} s: {paths}"
        time.sleep(0.02)


class Sender(threading.Thread):
    """Sends this process a signal once both ranks have touched a file, and again for the next.

    What a rank touches has to come after what the signal shall meet.
    """

    def __init__(self, signum: int, folder: Path, *names: str) -> None:
        super().__init__()
        self._signum, self._folder, self._names = signum, folder, names
        self.sent_s = 0.0
        self.start()

    def run(self) -> None:
        for name in self._names:
            wait_for(*(self._folder / f"{name}-{rank}" for rank in range(2)))
            self.sent_s = time.monotonic()
            os.kill(os.getpid(), self._signum)


SOON_S = 30.0
"""What takes no time may take this on a loaded machine; a rank here would go on for a minute."""


def test_ranks_know_their_place(workplace):
    body = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
Path(f"place-{rank.rank}").write_text(" ".join(os.environ[name] for name in names))
assert os.getsid(0) == os.getpid(), "a session of its own"
"""
    assert supervisor(body, num_ranks=3).run() == 0
    places = [Path(f"place-{rank}").read_text() for rank in range(3)]
    assert places == [f"{rank} {rank} 3 3 0 127.0.0.1" for rank in range(3)]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, None),
    ],
    ids=["neither", "of CUDA", "of any device"],
)
def test_the_memory_of_a_gpu_grows_in_segments_unless_the_user_says_otherwise(
    given, found, workplace, monkeypatch
):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    body = """
import json
named = {name: each for name, each in os.environ.items() if name.endswith("ALLOC_CONF")}
Path("allocator").write_text(json.dumps(named))
"""
    assert supervisor(body, num_ranks=1).run() == 0
    assert json.loads(Path("allocator").read_text()) == (given if found is None else found)


def test_nobody_can_take_the_port_before_rank_0_serves_it(workplace):
    body = """
import socket
if rank.rank == 0:
    inherited = socket.socket(fileno=int(os.environ["BOLTMESH_RENDEZVOUS_FD"]))
    assert inherited.getsockname()[1] == int(os.environ["MASTER_PORT"])
    time.sleep(0.5)
    inherited.accept()[0].sendall(b"here")
else:
    peer = socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])), timeout=60)
    assert peer.recv(4) == b"here", "a peer that comes early waits in the queue of the socket"
"""
    assert supervisor(body).run() == 0


def test_a_killed_rank_is_named_once_and_the_job_is_over_in_seconds(workplace, capfd):
    body = """
if rank.rank == 1:
    wait_for("working-0", "working-2")
    Path("dies").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
touch("working")
wait_for("dies")
lose_a_peer()
"""
    assert supervisor(body, num_ranks=3).run() == 1
    assert time.monotonic() - float(Path("dies").read_text()) < SOON_S
    pid = Path("pid-1").read_text()
    assert capfd.readouterr().err == (
        f"boltmesh: rank 1 (pid {pid}) was killed by signal 9 (SIGKILL); nothing else failed "
        f"before it. Often the system ran out of memory.\n"
    )


def test_a_rank_that_a_real_time_signal_ends_is_named(workplace, capfd):
    assert supervisor("os.kill(os.getpid(), 40)", num_ranks=1).run() == 1
    assert "was killed by signal 40 (unknown); nothing else failed" in capfd.readouterr().err


@pytest.mark.parametrize("look_every_s", [module.POLL_S, 2.0])
def test_the_dashboard_is_told_of_a_death_whoever_is_seen_first(
    workplace, monkeypatch, look_every_s
):
    """A supervisor that looks often sees the lost peer first, one that seldom looks all at once."""
    make_private_folder(job_path("test").parent)
    make_private_folder(job_path("test"))
    info = JobInfo.create(strategy="DDPStrategy", mesh={"data": 2}, world_size=2, id="test")
    write_job(info, job_path("test"))
    monkeypatch.setattr(module, "POLL_S", look_every_s)
    body = """
if rank.rank == 0:
    wait_for("working-1")
    lose_a_peer()
touch("working")
wait_for(rank.supervisor_folder / "rank-0.json")
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert supervisor(body).run() == 1
    end = read_end(job_path("test"))
    assert end is not None
    assert (end.rank, end.signal) == (1, signal.SIGKILL)


def test_a_rank_that_hangs_after_a_failure_is_ended(workplace, capfd):
    body = """
if rank.rank == 0:
    wait_for("deaf-1")
    Path("fails").write_text(str(time.monotonic()))
    raise ValueError("planted")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
touch("deaf")
time.sleep(60)
"""
    assert supervisor(body).run() == 1
    patience_s = module.FAILED_GRACE_S + module.TERMINATE_GRACE_S
    assert patience_s < time.monotonic() - float(Path("fails").read_text()) < patience_s + SOON_S
    assert not alive(int(Path("pid-1").read_text()))
    line = f"boltmesh: rank 0 (pid {Path('pid-0').read_text()}) failed: ValueError: planted"
    assert capfd.readouterr().err == f"{line}; add --traceback to see where\n"


def test_a_failure_is_named_before_its_consequences_whoever_ends_first(workplace, capfd):
    body = """
if rank.rank == 0:
    wait_for("working-1")
    lose_a_peer()
touch("working")
wait_for(rank.supervisor_folder / "rank-0.json")
raise KeyError("planted")
"""
    assert supervisor(body).run() == 1
    error = capfd.readouterr().err
    assert error.startswith(f"boltmesh: rank 1 (pid {Path('pid-1').read_text()}) failed: KeyError")
    assert error.count("\n") == 1


def test_ranks_that_all_lost_a_peer_say_so(workplace, capfd):
    assert supervisor("lose_a_peer()").run() == 1
    error = capfd.readouterr().err
    assert (
        "lost the connection to a peer, and no rank reported why: RuntimeError: [pair.cc:553]"
        in error
    )
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


def test_a_rank_that_leaves_with_code_0_is_the_cause_of_what_it_does_to_others(
    workplace, monkeypatch, capfd
):
    for others in ("time.sleep(60)", "wait_for('pid-1'); time.sleep(2); lose_a_peer()"):
        with monkeypatch.context() as patch:
            patch.setattr(module, "STOPPED_GRACE_S", 0.5)
            assert supervisor(f"if rank.rank == 1: os._exit(0)\n{others}").run() == 1
        pid = Path("pid-1").read_text()
        said = capfd.readouterr().err
        assert said.startswith(f"boltmesh: rank 1 (pid {pid}) exited with code 0; nothing else "), (
            said
        )
        assert said.count("\n") == 1
    assert supervisor("time.sleep(rank.rank / 5)\nsys.exit(0)").run() == 0
    assert capfd.readouterr().err == ""


def test_texts_that_no_encoding_has_or_that_steer_terminals_hide_no_cause(workplace, capfd):
    body = r"""
class Silent(Exception):
    def __str__(self):
        raise ValueError

if rank.rank == 1:
    rank.run_folder = Path.cwd() / "run-\udcff"
    raise {}
wait_for('pid-1')
time.sleep(0.3)
lose_a_peer()
"""
    for error, said in (
        (r"OSError('no file a\udcff')", r"OSError: no file a\udcff"),
        (r"ValueError('\x1b]0;gone\x07\x1b[2Jred')", "ValueError: ?]0;gone??[2Jred"),
        (r"ConfigError('\x1b[31mred\x9b')", "?[31mred?"),
        ("Silent()", "Silent"),
    ):
        supervisor(body.replace("{}", error), wants_traceback=True).run()
        last = capfd.readouterr().err
        assert "\x1b" not in last
        assert "\x9b" not in last
        assert said in last.splitlines()[-1], last


def test_the_traceback_is_kept_in_the_folder_of_the_run(workplace, capfd):
    body = "Path('run').mkdir(exist_ok=True)\nrank.run_folder = Path('run')\n1 / (1 - rank.rank)"
    assert supervisor(body).run() == 1
    error = capfd.readouterr().err
    assert error.endswith("ZeroDivisionError: division by zero; traceback: run/error-rank-1.txt\n")
    assert Path("run/error-rank-1.txt").read_text().startswith("Traceback (most recent call last)")


def test_a_traceback_that_holds_a_secret_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    for text, others_read in (("no secret", True), ("https://me:s3cret@host", False)):
        error = OSError(text)
        path = store_traceback(report_of_error(error, rank=1, run_folder=tmp_path))
        assert path is not None
        assert text in path.read_text()
        assert bool(path.stat().st_mode & 0o044) == others_read


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
touch("training")
while rank.stop.signum is None:
    time.sleep(0.01)
from boltmesh.launch.stopping import StoppedBySignal
raise StoppedBySignal(rank.stop.signum, step=41, checkpoint="kept.ckpt")
"""


@pytest.mark.parametrize(
    ("signum", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_is_handed_to_all_ranks_and_the_way_on_is_said(
    workplace, capfd, signum, code, name
):
    sender = Sender(signum, workplace, "training")
    assert supervisor(STOPPABLE).run() == code
    sender.join()
    first, _, last = capfd.readouterr().err.strip().partition("\n")
    assert first.startswith("boltmesh: stopping after this step")
    assert last == (
        f"boltmesh: stopped by {name} after step 41; checkpoint: kept.ckpt; "
        f"resume with: boltmesh fit mine.yaml resume=auto"
    )


def test_a_signal_before_training_ends_the_ranks_at_once(workplace, capfd):
    sender = Sender(signal.SIGINT, workplace, "working")
    assert supervisor("touch('working')\ntime.sleep(60)").run() == 130
    sender.join()
    assert time.monotonic() - sender.sent_s < SOON_S
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last == (
        "boltmesh: stopped by Ctrl-C before the first step; no checkpoint was written for it."
    )


def test_a_second_signal_kills_ranks_that_do_not_stop(workplace, capfd):
    body = """
rank.stop.is_training = True
touch("training")
while rank.stop.signum is None:
    time.sleep(0.01)
touch("asked")
time.sleep(60)
"""
    sender = Sender(signal.SIGINT, workplace, "training", "asked")
    assert supervisor(body).run() == 130
    sender.join()
    assert time.monotonic() - sender.sent_s < SOON_S
    assert not any(alive(int(Path(f"pid-{rank}").read_text())) for rank in range(2))
    assert capfd.readouterr().err.strip().splitlines()[-1] == (
        "boltmesh: killed by a second signal; resume with: boltmesh fit mine.yaml resume=auto"
    )


def test_a_failure_while_stopping_is_told_as_a_failure(workplace, capfd):
    body = """
rank.stop.is_training = True
touch("training")
while rank.stop.signum is None:
    time.sleep(0.01)
raise OffloadError("no space left for the checkpoint")
"""
    sender = Sender(signal.SIGINT, workplace, "training")
    assert supervisor(body).run() == 1
    sender.join()
    assert "no space left for the checkpoint" in capfd.readouterr().err


ORPHANED = """
    touch("working")
    time.sleep(60)
"""


def test_ranks_end_with_a_supervisor_that_is_killed(workplace):
    code = (
        "import sys; from boltmesh.launch.supervisor import Supervisor\n"
        "made = Supervisor(['fit', 'x'], num_ranks=2, job_id='test')\n"
        f"made.command = [sys.executable, '-c', {RANK + ORPHANED!r}\n"
        "                'sys.exit(rank.run(work))']\n"
        "made.run()\n"
    )
    # Who is killed leaves its folder behind: not in /tmp.
    environment = {**os.environ, "TMPDIR": str(workplace)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        wait_for(Path("working-0"), Path("working-1"))
    finally:
        parent.kill()
        parent.wait()
    pids = [int(Path(f"pid-{rank}").read_text()) for rank in range(2)]
    deadline = time.monotonic() + SOON_S
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "a rank outlived its supervisor"
        time.sleep(0.02)


def test_folders_of_killed_supervisors_are_deleted_by_the_next(workplace, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(workplace))
    own = ProcessId.own()
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = [f"{own.machine}-{ended.pid}-7-a", f"{own.machine}-{os.getpid()}-1-b"]
    kept = [
        f"{own.machine}-{own.pid}-{own.started}-c",
        f"0badcafe-{ended.pid}-7-d",
        "old",
        "1-2-x-4",
    ]
    for name in (*left, *kept):
        Path(f"boltmesh-ranks-{name}").mkdir()
    assert supervisor("pass").run() == 0
    found = {each.name for each in workplace.glob("boltmesh-ranks-*")}
    assert found == {f"boltmesh-ranks-{name}" for name in kept}


@pytest.mark.full
def test_and_so_are_those_of_killed_scripts(workplace, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(workplace))
    code = (
        "import os, signal\n"
        "from boltmesh.strategies.lightning_compat.launchers import RankErrors\n"
        "RankErrors.open_folder()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(workplace)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = workplace.glob("boltmesh-ranks-*")
    assert make_report_folder() != left
    assert not left.exists()


def test_a_rank_that_fails_after_its_script_has_ended_keeps_its_traceback(workplace, monkeypatch):
    from boltmesh.strategies.lightning_compat.launchers import RankErrors

    monkeypatch.setenv("BOLTMESH_RANK_REPORTS", str(workplace / "removed"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    RankErrors(1, workplace).report(ValueError("a late error"))
    assert "a late error" in (workplace / "error-rank-1.txt").read_text()


def test_a_rank_that_starts_after_its_supervisor_is_gone_ends_at_once(workplace):
    environment = {**os.environ, "BOLTMESH_SUPERVISOR": f"{os.getppid()}:{workplace}"}
    code = "from boltmesh.launch.rank import Rank; Rank.attach(); print('went on')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_the_command_that_continues_a_run_keeps_its_overrides():
    given = ["fit", "my config.yaml", "max_steps=5", "resume=runs/a.ckpt", "--traceback"]
    assert resume_command(given) == "boltmesh fit 'my config.yaml' max_steps=5 resume=auto"
