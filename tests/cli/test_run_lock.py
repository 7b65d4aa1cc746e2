"""Two runs never write to one folder, and a killed one keeps nobody out of it."""

import errno
import json
import os
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from boltmesh import run_lock
from boltmesh.cli import run_command
from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.run_lock import LOCK, LockHolder, RunLock
from tests.cli.conftest import TINY


def held_by(folder: Path, **changes: object) -> LockHolder:
    """Write a lock of some other process."""
    holder = msgspec.structs.replace(LockHolder.own(), id="other", **changes)
    (folder / LOCK).write_bytes(msgspec.json.encode(holder))
    return holder


def ended_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_second_of_two_is_refused_with_the_first_one_named(tmp_path: Path) -> None:
    lock = RunLock.take(tmp_path)
    said = json.loads((tmp_path / LOCK).read_text())
    with pytest.raises(ConfigError) as caught:
        RunLock.take(tmp_path)
    assert f"process {os.getpid()} on {said['host']}, since {said['since']}" in str(caught.value)
    lock.release()
    RunLock.take(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_of_many_at_once_one_takes_it_though_a_killed_one_held_it(tmp_path: Path) -> None:
    for _ in range(10):
        held_by(tmp_path, pid=ended_pid())
        together = threading.Barrier(8)

        def take() -> RunLock | None:
            together.wait()  # noqa: B023 - ends within this round
            try:
                return RunLock.take(tmp_path)
            except ConfigError:
                return None

        with ThreadPoolExecutor(8) as pool:
            taken = [each for each in pool.map(lambda _: take(), range(8)) if each]
        assert len(taken) == 1
        taken[0].check()
        taken[0].release()
        assert list(tmp_path.iterdir()) == []


def test_a_pid_that_another_process_has_now_is_no_holder(tmp_path: Path) -> None:
    held_by(tmp_path, started=1)
    RunLock.take(tmp_path).release()


def test_a_holder_elsewhere_keeps_it_while_it_touches_the_file(tmp_path: Path, capfd) -> None:
    held_by(tmp_path, machine="0badcafe", host="node7", pid=12)
    is_over = threading.Event()

    def touch() -> None:
        while not is_over.wait(0.05):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=touch)
    thread.start()
    with pytest.raises(ConfigError, match=r"process 12 on node7, since .* delete .*run\.lock"):
        RunLock.take(tmp_path, stale_s=20)
    is_over.set()
    thread.join()
    began = time.monotonic()
    RunLock.take(tmp_path, stale_s=0.3).release()
    assert time.monotonic() - began > 0.3
    assert (
        "is locked by process 12 on node7, which cannot be seen from here" in capfd.readouterr()[1]
    )


def test_a_lock_cut_short_by_a_power_failure_and_one_queued_again_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK).write_bytes(b"")
    RunLock.take(tmp_path, stale_s=0.2).release()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    held_by(tmp_path, machine="0badcafe")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    RunLock.take(tmp_path, stale_s=20).release()


def test_a_file_system_without_links_has_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    lock = RunLock.take(tmp_path)
    with pytest.raises(ConfigError, match="two runs in one folder"):
        RunLock.take(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_finds_no_room_for_its_lock_leaves_no_folder(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    write = Path.write_bytes

    def refuse(path: Path, data: bytes) -> int:
        if LOCK not in path.name:
            return write(path, data)
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert run_command(["fit", str(TINY), "devices=1", "max_steps=1"]) == 2
    assert "0 cannot be locked for this run: No space left on device" in capfd.readouterr().err
    assert list(Path("runs/tiny").iterdir()) == []


def test_a_run_whose_lock_was_taken_saves_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    lock = RunLock.take(tmp_path)
    before = (tmp_path / LOCK).stat().st_mtime_ns
    while (tmp_path / LOCK).stat().st_mtime_ns == before:
        time.sleep(0.01)
    lock.check()
    other = held_by(tmp_path, host="node7")
    with pytest.raises(CheckpointError, match=f"taken over by process {other.pid} on node7"):
        lock.check()
    lock.release()
    assert (tmp_path / LOCK).exists()


def test_a_run_gives_its_folder_back_and_the_next_resumes_in_it(workplace: Path, capfd) -> None:
    line = ["fit", str(TINY), "devices=1"]
    assert run_command([*line, "max_steps=2"]) == 0
    folder = Path("runs/tiny/0")
    assert not (folder / LOCK).exists()
    lock = RunLock.take(folder)
    assert run_command([*line, "max_steps=4", "resume=auto"]) == 2
    assert f"runs/tiny/0 is being written by process {os.getpid()}" in capfd.readouterr().err
    # Of several ranks none is started: those that wait for the first would print torch's warnings.
    assert run_command(["fit", str(TINY), "devices=2", "max_steps=4", "resume=auto"]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"boltmesh: runs/tiny/0 is being written by process {os.getpid()}")
    assert error.count("\n") == 1
    assert (folder / "checkpoints").exists()
    lock.release()
    shutil.copy(folder / "config.yaml", "before.yaml")
    held_by(folder, pid=ended_pid())
    assert run_command([*line, "max_steps=4", "resume=auto"]) == 0
    assert not Path("runs/tiny/1").exists()
