"""``boltmesh prune``, and the bounds that runs keep by themselves."""

import os
import shutil
import time
from pathlib import Path

import pytest

from boltmesh.cli import run_command
from boltmesh.errors import ConfigError
from boltmesh.process import ProcessId
from boltmesh.prune import DEFAULT_PATTERN, remove_left_by_kills, stale_checkpoints
from boltmesh.run_lock import RunLock
from boltmesh.telemetry.job import JobInfo, make_private_folder, rank_file, write_job
from boltmesh.telemetry.pruning import ended_jobs, remove_old_jobs
from boltmesh.telemetry.writer.rank_file import RankFile
from boltmesh.tui import units
from tests.cli.conftest import TINY
from tests.cli.test_run_lock import ended_pid, held_by

RUN = Path("runs/tiny/0")
KEPT = RUN / "checkpoints"
LINE = ["fit", str(TINY), "devices=1"]


def names() -> set[str]:
    return {each.name for each in KEPT.iterdir()}


def killed_save(name: str) -> Path:
    """What a killed process leaves of a save."""
    machine = ProcessId.own().machine
    path = KEPT / f"{name}.{machine}-{ended_pid()}-7-0123abcd.partial"
    path.write_bytes(bytes(500))
    return path


@pytest.fixture
def left(workplace) -> Path:
    """A finished run, and in its folder what kills would have left there."""
    assert run_command([*LINE, "max_steps=4", "checkpoint.every_n_steps=2"]) == 0
    assert names() == {"epoch=0-step=4.ckpt", "last.ckpt"}
    for name in ("epoch=0-step=2.ckpt", "epoch=0-step=3-v1.ckpt", "interrupted-step=1.ckpt"):
        shutil.copy(KEPT / "last.ckpt", KEPT / name)
        os.utime(KEPT / name, (1, 1))
    shutil.copy(KEPT / "last.ckpt", KEPT / "mine.ckpt")
    os.utime(KEPT / "mine.ckpt", (1, 1))
    killed_save("epoch=0-step=6.ckpt")
    return workplace


WHOLE = {"epoch=0-step=4.ckpt", "last.ckpt", "mine.ckpt"}


def test_what_kills_have_left_is_deleted_and_told_with_its_bytes(left, capfd):
    empty = Path("runs/tiny/1")
    (empty / "logs/0").mkdir(parents=True)
    shutil.copy(RUN / "config.yaml", empty)
    before = names()
    capfd.readouterr()
    assert run_command(["prune", "--dry-run"]) == 0
    printed = capfd.readouterr().out
    assert names() == before
    assert empty.exists()
    assert run_command(["prune"]) == 0
    assert capfd.readouterr().out == printed.replace("would go", "deleted ").replace(
        "would be deleted", "deleted"
    )
    assert names() == WHOLE
    assert not empty.exists()
    assert (RUN / "logs/0/metrics.csv").exists()
    size = (KEPT / "last.ckpt").stat().st_size
    lines = printed.splitlines()
    assert lines[0].startswith("would go   runs/tiny/1 (run without a step, ")
    assert f"epoch=0-step=2.ckpt (stale checkpoint, {units.traffic(size)})" in printed
    assert ".partial (unfinished save, 500 B)" in printed
    total = 3 * size + 500 + (RUN / "config.yaml").stat().st_size
    assert lines[-1] == f"boltmesh: {units.traffic(total)} would be deleted"
    assert not list(RUN.glob("*lock*"))
    assert run_command(["prune", "nowhere"]) == 2


def test_a_run_in_use_is_left_alone(left, capfd):
    before = names()
    lock = RunLock.take(RUN)
    capfd.readouterr()
    assert run_command(["prune"]) == 0
    assert "kept       runs/tiny/0 (in use)" in capfd.readouterr().out
    assert names() == before
    lock.release()
    held_by(RUN, machine="0badcafe")  # of another machine: it cannot be seen whether it lives
    assert run_command(["prune"]) == 0
    assert names() == before
    os.utime(RUN / "run.lock", (1, 1))
    assert run_command(["prune"]) == 0
    assert names() == WHOLE


def test_a_run_that_cannot_be_locked_does_not_keep_others_from_being_pruned(
    left, capfd, monkeypatch
):
    shutil.copytree(RUN, "runs/other/0")
    take = RunLock.take

    def fails(folder: Path, **given: float) -> RunLock:
        if folder.parts[-2] == "other":
            raise ConfigError(f"{folder} cannot be locked for this run: Permission denied.")
        return take(folder, **given)

    monkeypatch.setattr(RunLock, "take", fails)
    assert run_command(["prune"]) == 0
    printed = capfd.readouterr().out
    assert "kept       runs/other/0 (runs/other/0 cannot be locked for this run: Perm" in printed
    assert names() == WHOLE


def test_the_newest_whole_checkpoint_stays_where_the_newest_is_damaged(left, capfd):
    for name in ("epoch=0-step=4.ckpt", "last.ckpt"):
        content = bytearray((KEPT / name).read_bytes())
        content[len(content) // 2] ^= 1
        (KEPT / name).write_bytes(content)
    os.utime(KEPT / "epoch=0-step=2.ckpt", (2, 2))
    assert run_command(["prune"]) == 0
    assert (KEPT / "epoch=0-step=2.ckpt").exists()
    assert (KEPT / "epoch=0-step=4.ckpt").exists()
    assert (KEPT / "last.ckpt").exists()
    assert not (KEPT / "epoch=0-step=3-v1.ckpt").exists()


def test_a_resumed_run_deletes_what_its_killed_starts_have_left(left):
    empty = Path("runs/tiny/1")
    empty.mkdir(parents=True)
    shutil.copy(RUN / "config.yaml", empty)
    held_by(empty, pid=ended_pid())
    ended = Path("runs/tiny/2")  # by itself, so that it has returned its lock
    shutil.copytree(empty, ended, ignore=shutil.ignore_patterns("run.lock"))
    assert run_command([*LINE, "max_steps=6", "checkpoint.every_n_steps=2", "resume=auto"]) == 0
    assert names() == {"epoch=0-step=6.ckpt", "last.ckpt", "mine.ckpt"}
    assert not empty.exists()
    assert ended.exists()


def test_names_of_the_pattern_alone_are_stale(tmp_path):
    pattern = "best-{epoch}-{val_loss:.2f}"
    for name in (
        "best-epoch=1-val_loss=0.50.ckpt",
        "best-epoch=2-val_loss=0.25.ckpt",
        "best-epoch=2-val_loss=0.25-v1.ckpt",
        "best.ckpt",
        "epoch=0-step=3.ckpt",
        "best-epoch=1-val_loss=0.50.ckpt.damaged",
    ):
        (tmp_path / name).touch()
    kept = ["best-epoch=2-val_loss=0.25.ckpt"]
    stale = {each.name for each in stale_checkpoints(tmp_path, kept, pattern)}
    assert stale == {"best-epoch=1-val_loss=0.50.ckpt", "best-epoch=2-val_loss=0.25-v1.ckpt"}
    found = stale_checkpoints(tmp_path, [], DEFAULT_PATTERN)
    assert [each.name for each in found] == ["epoch=0-step=3.ckpt"]
    (tmp_path / "checkpoints").mkdir()
    remove_left_by_kills(tmp_path, [], DEFAULT_PATTERN)  # without a state nothing is known
    assert len(list(tmp_path.glob("*.ckpt"))) == 5


def job(folder: Path, number: int, *, is_live: bool = False) -> RankFile:
    """Write the telemetry of a job that changed so many thousand seconds ago."""
    path = folder / f"job{number}"
    make_private_folder(folder)
    make_private_folder(path)
    file = RankFile(rank_file(path, 0), rank=0, world_size=1)
    info = JobInfo.create(strategy="DDPStrategy", mesh={"data": 1}, world_size=1, id=path.name)
    write_job(info, path)
    if not is_live:
        file.close()
    before = time.time() - 1000 * number
    for each in (*path.iterdir(), path):
        os.utime(each, (before, before))
    return file


def test_telemetry_of_ended_jobs_is_bounded_the_oldest_goes_first(tmp_path):
    folder = tmp_path / "telemetry"
    files = [job(folder, number, is_live=number == 4) for number in range(6)]
    assert files[4].path.exists()
    found = ended_jobs(folder)
    assert [each.path.name for each in found] == ["job1", "job2", "job3", "job5"], "0 may go on"
    remove_old_jobs(folder, most_bytes=2 * found[0].num_bytes)
    left = {each.name for each in folder.iterdir()}
    assert left == {"job0", "job1", "job2", "job4"}
    files[4].close()


def test_telemetry_of_old_jobs_is_pruned(workplace, capfd):
    Path("runs").mkdir()
    job(workplace / "telemetry", 3).close()
    assert run_command(["prune"]) == 0
    assert capfd.readouterr().out == "boltmesh: 0 B deleted\n"
    assert run_command(["prune", "--telemetry-days", "0.01"]) == 0
    assert "job3 (telemetry, " in capfd.readouterr().out
    assert not (workplace / "telemetry/job3").exists()
