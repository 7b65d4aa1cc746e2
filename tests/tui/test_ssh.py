"""``--ssh`` against a real sshd: attaching, every way of not attaching, and a cut connection."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from boltmesh.errors import BoltMeshError, ConfigError, TelemetryError
from boltmesh.tui.commands.top import jobs as show_jobs
from boltmesh.tui.commands.top import top as show_top
from boltmesh.tui.sources.ssh.hosts import Hosts, SshSource, list_remote_jobs
from boltmesh.tui.sources.ssh.remote import SSH_VARIABLE, Remote
from tests.support.written_jobs import WrittenJob
from tests.tui.sshd import Sshd, kill, needs_sshd, running_sshd

pytestmark = needs_sshd

NODE = Remote("node", interval_s=0.1)
NO_PATH = "/usr/bin:/bin"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where jobs are on the other side: not where they would be looked for here."""
    return tmp_path / "there"


@pytest.fixture
def sshd(tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    with running_sshd(tmp_path / "ssh", run_dir) as sshd:
        monkeypatch.setenv(SSH_VARIABLE, f"ssh -F {sshd.config}")
        yield sshd


@pytest.fixture
def job(run_dir: Path) -> Iterator[WrittenJob]:
    with contextlib.closing(WrittenJob(run_dir)) as job:
        yield job


@contextlib.contextmanager
def attached(remote: Remote = NODE, job: str | None = None) -> Iterator[SshSource]:
    source = SshSource(remote, job, first_pause_s=0.1)
    with contextlib.closing(source):
        yield source


def refusal(remote: Remote = NODE, job: str | None = None) -> str:
    """Return the one line that says why there is nothing to see."""
    with attached(remote, job) as source, pytest.raises(BoltMeshError) as told:
        source.read()
    assert "\n" not in str(told.value)
    return str(told.value)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []  # it has just gone


def step_seen(source: SshSource) -> int:
    with contextlib.suppress(TelemetryError):
        return source.read().job.global_step
    return -1


def test_a_job_there_is_seen_here(sshd: Sshd, job: WrittenJob) -> None:
    with attached() as source:
        seen = source.read()
        assert seen.job.id == "abcd"
        assert [rank.state for rank in seen.job.ranks] == ["running"] * 2
        job.step()
        wait_for(lambda: step_seen(source) == 2, "the second step")
        assert [len(rank.steps) for rank in source.read().job.ranks] == [2, 2]
        assert source.hello is not None
        assert source.hello.python == sys.executable
    wait_for(lambda: not sshd.sessions(), "the end of what was started there")


def test_what_a_login_prints_is_skipped(tmp_path: Path, job: WrittenJob, run_dir: Path) -> None:
    """bash reads BASH_ENV before a command, as it reads ~/.bashrc of a login by ssh."""
    noise = tmp_path / "noise.sh"
    noise.write_text(
        "for number in $(seq 200); do echo welcome boltmesh-frames 7; done\n"
        "printf '\\033[2J no end of line'\n"
        "echo careful >&2\n"
    )
    with running_sshd(tmp_path / "ssh", run_dir, BASH_ENV=str(noise)) as sshd:
        os.environ[SSH_VARIABLE] = f"ssh -F {sshd.config}"
        command = f"bash -c 'exec {Path(sys.executable).parent}/boltmesh \"$@\"' --"
        with attached(Remote("node", command)) as source:
            assert source.read().job.id == "abcd"


def test_noise_without_end_is_no_login(sshd: Sshd, job: WrittenJob) -> None:
    assert "more than 1 MiB of other things" in refusal(Remote("node", "yes;"))


@pytest.mark.parametrize("host", ["127.0.0.2", "nowhere.invalid"], ids=["refuses", "unknown"])
def test_a_cut_connection_keeps_the_last_and_comes_back(
    sshd: Sshd, job: WrittenJob, host: str
) -> None:
    with attached() as source:
        source.read()
        sshd.write_config(host=host)
        sshd.cut()
        wait_for(lambda: step_seen(source) == -1, "the cut")
        with pytest.raises(TelemetryError, match=r"disconnected \d+ s, trying again: ") as told:
            source.read()
        assert "\n" not in str(told.value)
        assert "node" in str(told.value)
        job.step()
        sshd.write_config()
        wait_for(lambda: step_seen(source) == 2, "the job again")
        assert source.read().job.id == "abcd"


def test_it_comes_back_to_the_same_job(sshd: Sshd, job: WrittenJob, run_dir: Path) -> None:
    with attached() as source:
        source.read()
        with contextlib.closing(WrittenJob(run_dir, "newer")):
            sshd.cut()
            job.step()  # which another connection has to tell
            wait_for(lambda: step_seen(source) == 2, "the job again")
            assert source.read().job.id == "abcd"


def test_a_killed_stream_comes_back_with_the_interpreter_of_the_job(
    sshd: Sshd, run_dir: Path
) -> None:
    """The first time it is found by what the job says; the second time it is known."""
    marked = Remote("node")
    with contextlib.closing(WrittenJob(run_dir)) as job, attached(marked) as source:
        source.read()
        kill([process for process in sshd.sessions() if "stream" in command_of(process)])
        job.step()  # which another stream has to tell
        wait_for(lambda: step_seen(source) == 2, "the stream again")
        lines = [command_of(process) for process in sshd.sessions()]
        assert [sys.executable, "-m", "boltmesh"] in [line[:3] for line in lines]


def test_a_login_that_is_refused(sshd: Sshd, job: WrittenJob) -> None:
    sshd.write_config(key="stranger")
    told = refusal()
    assert told.startswith("node refuses the login (")
    assert "Permission denied" in told
    assert "agent" in told


def test_a_host_key_that_has_changed(sshd: Sshd, job: WrittenJob) -> None:
    sshd.know((sshd.folder / "stranger.pub").read_text())
    told = refusal()
    assert told.startswith("the key of node is not the one that you know")
    assert "ssh-keygen -R" in told


def test_a_host_key_that_is_not_known_is_not_taken(sshd: Sshd, job: WrittenJob) -> None:
    sshd.know("")
    assert "Connect once with 'ssh node'" in refusal()
    assert (sshd.folder / "known_hosts").read_text().strip() == "node"


def test_nobody_who_listens(sshd: Sshd) -> None:
    sshd.write_config(host="127.0.0.2")
    told = refusal()
    assert told.startswith("node cannot be reached (")
    assert "Connection refused" in told


def test_a_host_that_is_not(sshd: Sshd) -> None:
    assert refusal(Remote("nowhere.invalid")).startswith("there is no host nowhere.invalid (")


def test_a_host_that_does_not_answer(sshd: Sshd) -> None:
    source = SshSource(Remote("node", "sleep 60;"), answer_s=0.5)
    with contextlib.closing(source), pytest.raises(TelemetryError, match="within 0 s"):
        source.read()


def test_a_program_around_ssh_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = tmp_path / "around"
    wrapper.write_text("#!/bin/sh\nsleep 60\ntrue\n", encoding="utf-8")
    wrapper.chmod(0o700)
    monkeypatch.setenv(SSH_VARIABLE, str(wrapper))
    began = time.monotonic()
    source = SshSource(NODE, answer_s=0.5)
    with contextlib.closing(source), pytest.raises(TelemetryError, match="within 0 s"):
        source.read()
    with attached():  # one that is closed before it answers
        time.sleep(0.2)
    assert time.monotonic() - began < 30


def test_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SSH_VARIABLE, "/nowhere/ssh -v")
    assert "Install OpenSSH's client" in refusal()
    monkeypatch.setenv(SSH_VARIABLE, "ssh '")
    with pytest.raises(ConfigError, match="is no command"):
        Remote("node").ssh_line()


@pytest.mark.parametrize("host", ["", "-oProxyCommand=touch x", "a b", "a\nb", "\x1b[2J"])
def test_a_host_that_ssh_would_misread_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="is no host"):
        Remote(host)


def test_boltmesh_that_is_missing_there(tmp_path: Path, run_dir: Path) -> None:
    with running_sshd(tmp_path / "ssh", run_dir, PATH=NO_PATH) as sshd:
        os.environ[SSH_VARIABLE] = f"ssh -F {sshd.config}"
        for remote in (
            NODE,
            Remote("node", "/no/boltmesh"),
            Remote("node", f"{sys.executable} -I -S -m boltmesh"),
        ):
            told = refusal(remote)
            assert told.startswith("node has no boltmesh that could be found"), told
            assert "--remote-command" in told


def test_boltmesh_is_found_beside_a_job(tmp_path: Path, run_dir: Path) -> None:
    with (
        running_sshd(tmp_path / "ssh", run_dir, PATH=NO_PATH) as sshd,
        contextlib.closing(WrittenJob(run_dir)),
    ):
        os.environ[SSH_VARIABLE] = f"ssh -F {sshd.config}"
        with attached() as source:
            assert source.read().job.id == "abcd"
        with attached(Remote("node", run_dir=str(run_dir))) as source:
            assert source.read().job.id == "abcd"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_interpreter_that_somebody_else_names_is_not_run(tmp_path: Path, run_dir: Path) -> None:
    trap, sprung = tmp_path / "trap", tmp_path / "sprung"
    trap.write_text(f"#!/bin/sh\ntouch {sprung}\n")
    trap.chmod(0o755)
    with (
        running_sshd(tmp_path / "ssh", run_dir, PATH=NO_PATH) as sshd,
        contextlib.closing(WrittenJob(run_dir, python=str(trap))) as job,
    ):
        os.environ[SSH_VARIABLE] = f"ssh -F {sshd.config}"
        os.chown(run_dir, 12345, 12345)
        assert "no boltmesh" in refusal()
        os.chown(run_dir, 0, 0)
        os.chown(job.path / "job.json", 12345, 12345)
        assert "no boltmesh" in refusal()
        assert not sprung.exists()
        os.chown(job.path / "job.json", 0, 0)
        refusal()
        assert sprung.exists(), "the trap works, and was not reached before"


def test_a_folder_of_that_name_is_not_taken_for_boltmesh(tmp_path: Path, run_dir: Path) -> None:
    """A checkout in the home folder would be found before a package that is installed editable."""
    home = tmp_path / "home"
    (home / "boltmesh").mkdir(parents=True)
    line = Remote("node", run_dir=str(run_dir)).ssh_line(wants_list=True)[-1]
    environment = {key: os.environ[key] for key in ("HOME",)} | {
        "PATH": NO_PATH,
        "SHELL": "/bin/sh",
    }
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    with contextlib.closing(WrittenJob(run_dir)):
        done = subprocess.run(
            ["sh", "-c", line], cwd=home, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, check=False,
        )  # fmt: skip
    assert b"boltmesh-frames 1 " in done.stdout, done.stderr
    assert done.returncode == 0


def test_another_version_there(sshd: Sshd) -> None:
    told = refusal(Remote("node", r"printf 'boltmesh-frames 9 8.0.0\n'; true"))
    assert "boltmesh 8.0.0 there writes frames of version 9" in told
    told = refusal(Remote("node", "echo \"Error: No such command 'stream'.\" >&2; exit 2; true"))
    assert "too old" in told


def test_a_frame_that_is_damaged_is_no_frame(sshd: Sshd) -> None:
    line = r"printf 'boltmesh-frames 1 0.1.0\n\0\0\0\4abcdefgh'; sleep 60; true"
    assert "checksum" in refusal(Remote("node", line))


def test_no_job_there(sshd: Sshd, run_dir: Path) -> None:
    assert refusal().startswith(f"node: there is no job in {run_dir}")


def test_a_job_that_is_not_there_is_refused_in_one_line(sshd: Sshd, job: WrittenJob) -> None:
    assert "'boltmesh jobs' lists them." in refusal(job="abxx; echo $HOME '")


def test_what_stays_open_is_no_reason_to_wait(sshd: Sshd, job: WrittenJob) -> None:
    """A shared connection leaves a master behind, which keeps ssh's stderr."""
    sshd.write_config(
        more=f"  ControlMaster auto\n  ControlPath {sshd.folder}/c\n  ControlPersist 60\n"
    )
    try:
        for _ in range(2):
            began = time.monotonic()
            with attached() as source:
                assert source.read().job.id == "abcd"
            assert time.monotonic() - began < 30  # the master stays for twice that
    finally:
        command = ["ssh", "-F", str(sshd.config), "-O", "exit", "node"]
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


def test_forwards_of_the_config_are_left_alone(sshd: Sshd, job: WrittenJob) -> None:
    sshd.write_config(
        more=f"  LocalForward 127.0.0.1:{sshd.port} 127.0.0.1:1\n  ExitOnForwardFailure yes\n"
    )
    with attached() as source:
        assert source.read().job.id == "abcd"


def test_jobs_there_are_listed(sshd: Sshd, job: WrittenJob) -> None:
    assert [each.id for each in list_remote_jobs(NODE)] == ["abcd"]


def test_several_hosts_show_one_job(sshd: Sshd, tmp_path: Path) -> None:
    boltmesh = Path(sys.executable).parent / "boltmesh"
    with contextlib.ExitStack() as stack:
        remotes = []
        for number in range(2):
            there = tmp_path / f"run{number}"
            job = WrittenJob(there, world_size=2, ranks=(number,), host=f"host{number}")
            stack.enter_context(contextlib.closing(job))
            remotes.append(Remote(f"node{number + 1}", str(boltmesh), str(there)))
        source = Hosts(remotes).open()
        stack.enter_context(contextlib.closing(source))
        seen = source.read()
    assert [(rank.rank, rank.host, rank.state) for rank in seen.job.ranks] == [
        (0, "host0", "running"),
        (1, "host1", "running"),
    ]


Capture = pytest.CaptureFixture[str]


def test_top_and_jobs_from_the_command_line(sshd: Sshd, job: WrittenJob, capsys: Capture) -> None:
    assert show_top(once=True, ssh=("node",)) == 0
    out, err = capsys.readouterr()
    assert "step 1" in out
    assert err == ""
    assert show_top("ab", once=True, as_json=True, ssh=("node",)) == 0
    document = json.loads(capsys.readouterr().out)
    assert [rank["pid"] for rank in document["ranks"]] == [os.getpid()] * 2
    assert show_jobs(as_json=True, ssh="node") == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)["jobs"]] == ["abcd"]
    assert show_jobs(ssh="node") == 0
    assert "abcd" in capsys.readouterr().out


def test_what_is_wrong_is_one_line_and_a_code(sshd: Sshd, job: WrittenJob, capsys: Capture) -> None:
    assert show_top(once=True, ssh=("-v",)) == 2
    assert capsys.readouterr().err == (
        "boltmesh: --ssh '-v' is no host. Use a name from your ssh config, user@host or "
        "ssh://user@host:port.\n"
    )
    sshd.write_config(key="stranger")
    assert show_top(once=True, ssh=("node",)) == 1
    err = capsys.readouterr().err
    assert err.startswith("boltmesh: node refuses the login")
    assert err.count("\n") == 1
    assert show_jobs(ssh="node") == 1
    assert capsys.readouterr().err == err
