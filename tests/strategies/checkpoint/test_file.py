"""A checkpoint file is complete or absent, whatever happens while it is written."""

import errno
import multiprocessing
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.atomic_replace import PARTIAL
from boltmesh.strategies.checkpoint.file import AtomicCheckpointIO, write_file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weight": torch.arange(3)}, path)
    assert AtomicCheckpointIO().load_checkpoint(path)["weight"].tolist() == [0, 1, 2]
    assert [each.name for each in path.parent.iterdir()] == ["a.ckpt"]


class _KillsItsWriter:
    """Something that a checkpoint may hold, and that ends the process while it is pickled."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return (int, ())


def _write(path: Path) -> None:
    big = torch.zeros(1 << 20)
    AtomicCheckpointIO().save_checkpoint({"big": big, "bomb": _KillsItsWriter()}, path)


def test_a_torn_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    writer = multiprocessing.get_context("fork").Process(target=_write, args=(path,))
    writer.start()
    writer.join(30)
    assert writer.exitcode == -signal.SIGKILL
    assert AtomicCheckpointIO().load_checkpoint(path) == {"step": 1}


def test_a_full_disk_is_named_and_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    def full(checkpoint: object, file: Any) -> None:
        file.write(b"half of")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"a\.ckpt could not be written: No space left"):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    monkeypatch.undo()
    assert AtomicCheckpointIO().load_checkpoint(path) == {"step": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_disk_that_fills_within_a_save_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"a\.ckpt could not be written: File too large\."
        ):
            AtomicCheckpointIO().save_checkpoint({"step": torch.zeros(1 << 20)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, heard)
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]
    assert AtomicCheckpointIO().load_checkpoint(path) == {"step": 1}


def test_a_save_that_is_interrupted_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(checkpoint: object, file: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_file_takes_the_place_of_a_directory_of_shards(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.mkdir()
    (path / "meta.pt").write_bytes(b"old")
    path.with_name(path.name + PARTIAL).mkdir()
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    assert AtomicCheckpointIO().load_checkpoint(path) == {"step": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    AtomicCheckpointIO().remove_checkpoint(path)
    assert list(tmp_path.iterdir()) == []


def test_a_remote_file_system_keeps_the_way_of_lightning() -> None:
    AtomicCheckpointIO().save_checkpoint({"step": 3}, "memory://folder/a.ckpt")
    assert AtomicCheckpointIO().load_checkpoint("memory://folder/a.ckpt") == {"step": 3}


def test_two_saves_of_one_name_at_once_are_each_whole(tmp_path: Path) -> None:
    target = tmp_path / "a.ckpt"
    together = threading.Barrier(2, timeout=120)

    def save(value: bytes) -> None:
        def fill(file: Any) -> None:
            file.write(value * 1000)
            together.wait()  # both files are open
            file.write(value * 1000)

        write_file(target, fill)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, (b"one", b"two")))
    assert target.read_bytes() in {b"one" * 2000, b"two" * 2000}
    assert list(tmp_path.iterdir()) == [target]
