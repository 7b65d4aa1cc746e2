"""One name for the old and the new, and never half of either."""

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from boltmesh.process import ProcessId
from boltmesh.strategies.checkpoint import atomic_replace
from boltmesh.strategies.checkpoint.atomic_replace import (
    partial_path,
    remove,
    remove_killed_saves,
    replace,
)


def make(path: Path, kind: str, content: str) -> Path:
    if kind == "directory":
        path.mkdir()
        (path / "inside").write_text(content)
    elif kind == "link":
        make(path.with_name(f"{path.name}-target"), "directory", content)
        path.symlink_to(f"{path.name}-target")
    elif kind == "file":
        path.write_text(content)
    return path


def read(path: Path) -> str:
    return (path / "inside" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("new", ["file", "directory"])
@pytest.mark.parametrize("old", ["nothing", "file", "directory", "link"])
def test_anything_takes_the_place_of_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, *, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic_replace, "_exchange", lambda one, other: False)
    target = make(tmp_path / "a.ckpt", old, "old")
    replace(make(tmp_path / "a.ckpt.partial", new, "new"), target)
    assert read(target) == "new"
    assert not target.is_symlink()
    left = {each.name for each in tmp_path.iterdir()} - {"a.ckpt-target"}
    assert left == {"a.ckpt"}
    if old == "link":
        assert read(tmp_path / "a.ckpt-target") == "old"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_old_one_that_cannot_be_removed_does_not_fail_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, can_exchange: bool
) -> None:
    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    if not can_exchange:
        monkeypatch.setattr(atomic_replace, "_exchange", lambda one, other: False)
    target = make(tmp_path / "a.ckpt", "directory", "old")
    partial = make(tmp_path / "a.ckpt.partial", "directory", "new")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        replace(partial, target)
    assert read(target) == "new"
    remove(partial)
    replace(make(partial, "directory", "newer"), target)
    assert read(target) == "newer"
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]


def test_this_file_system_exchanges_names_in_one_step(tmp_path: Path) -> None:
    one, other = make(tmp_path / "a", "file", "a"), make(tmp_path / "b", "directory", "b")
    assert atomic_replace._exchange(one, other)
    assert (read(one), read(other)) == ("b", "a")
    with pytest.raises(FileNotFoundError):
        atomic_replace._exchange(one, tmp_path / "missing")


@pytest.mark.parametrize("kind", ["file", "directory", "link", "nothing"])
def test_what_is_removed_is_gone_and_what_it_links_to_is_not(tmp_path: Path, kind: str) -> None:
    make(tmp_path / "a.ckpt", kind, "old")
    remove(tmp_path / "a.ckpt")
    assert {each.name for each in tmp_path.iterdir()} <= {"a.ckpt-target"}
    assert (tmp_path / "a.ckpt-target").exists() == (kind == "link")


def test_a_removal_that_was_cut_short_is_finished_by_the_next(tmp_path: Path) -> None:
    make(tmp_path / "a.ckpt.removed", "directory", "half of it")
    remove(make(tmp_path / "a.ckpt", "directory", "old"))
    assert list(tmp_path.iterdir()) == []


def test_a_save_deletes_what_killed_processes_left_and_nothing_of_others(tmp_path: Path) -> None:
    target = tmp_path / "a.ckpt"
    ended = subprocess.Popen(["sleep", "60"])
    process = ProcessId.own()._replace(pid=ended.pid)
    killed, reused, old = (
        make(tmp_path / f"a.ckpt.{name}-0123abcd.partial", "directory", "half")
        for name in (
            f"{process.machine}-{process.pid}-0",
            f"{process.machine}-{os.getpid()}-1",
            f"0badcafe-{process.pid}-5",
        )
    )
    make(tmp_path / "a.ckpt.partial", "file", "of an earlier version")
    for path in (old / "inside", old):
        os.utime(path, (0, 0))
    ended.kill()  # and not waited for: a zombie has ended
    while "Z" not in Path(f"/proc/{ended.pid}/stat").read_text():
        time.sleep(0.01)
    kept = {
        make(partial_path(target), "directory", "another thread's"),
        make(tmp_path / f"a.ckpt.0badcafe-{process.pid}-5-89abcdef.partial", "file", "elsewhere"),
        make(tmp_path / "a.ckpt2.partial", "file", "of another checkpoint"),
    }
    remove_killed_saves(target)
    ended.wait()
    assert set(tmp_path.iterdir()) == kept
    assert not any(path.exists() for path in (killed, reused, old))


def test_no_two_saves_write_under_one_name(tmp_path: Path) -> None:
    assert len({partial_path(tmp_path / "a.ckpt") for _ in range(100)}) == 100
    name = partial_path(tmp_path / "hpc_ckpt_12.ckpt").name
    assert "hpc_ckpt_" not in name  # Lightning takes the highest number for the newest
