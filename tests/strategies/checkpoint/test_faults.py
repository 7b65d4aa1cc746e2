"""Whatever kills or fills a save: the checkpoint of before or the new one is there, whole."""

import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from boltmesh.errors import CheckpointError
from boltmesh.run_folder import newest_checkpoint
from boltmesh.strategies.checkpoint import atomic_replace, directory, shard_writer
from boltmesh.strategies.checkpoint.directory import load_directory, save_directory
from boltmesh.strategies.checkpoint.manifest import find_fault
from boltmesh.strategies.checkpoint.storage import folder as folder_module
from tests.support.ranks import RankFailure, run_ranks
from tests.support.sharded import build


def save(folder: Path, step: int) -> None:
    module = build(seed=step)
    checkpoint = {"state_dict": module.state_dict(keep_vars=True), "global_step": step}
    save_directory(checkpoint, folder / "last.ckpt")


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(rank: int, world_size: int, folder: Path, where: str) -> None:
    save(folder, 1)
    rename = Path.rename

    def rename_but_the_new_one(path: Path, target: Path) -> Path:
        if path.name.endswith(atomic_replace.PARTIAL):
            die()
        return rename(path, target)

    faults: dict[str, list[tuple[Any, str, Any]]] = {
        "rank 0 in its shards": [(shard_writer, "_write_piece", die)],
        "rank 1 in its shards": [(shard_writer, "_write_piece", die)],
        "before the manifest": [(directory, "write_manifest", die)],
        "before the new name": [(folder_module, "replace", die)],
        "before the old one is deleted": [(atomic_replace, "remove", die)],
        "between two names": [
            # As on a file system that cannot exchange names in one step.
            (atomic_replace, "_exchange", lambda one, other: False),
            (Path, "rename", rename_but_the_new_one),
        ],
    }
    if rank == (1 if "rank 1" in where else 0):
        for owner, name, fault in faults[where]:
            mock.patch.object(owner, name, fault).start()
    save(folder, 2)


@pytest.mark.sample("rank 1 in its shards-1", "between two names-1")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("where", "step"),
    [
        ("rank 1 in its shards", 1),
        ("rank 0 in its shards", 1),
        ("before the manifest", 1),
        ("before the new name", 1),
        ("between two names", 1),
        ("before the old one is deleted", 2),
    ],
)
def test_a_kill_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, where: str, step: int
) -> None:
    folder = tmp_path / "0" / "checkpoints"
    with pytest.raises(RankFailure, match="died with exit code -9"):
        run_ranks(save_and_die, 2, folder, where)
    found = newest_checkpoint(tmp_path)
    assert found == folder / "last.ckpt"
    checkpoint = load_directory(found)
    assert checkpoint["global_step"] == step
    torch.manual_seed(step)
    expected = torch.nn.Embedding(7, 5).weight
    assert torch.equal(checkpoint["state_dict"]["embedding.weight"].load(), expected)
    # What the kill has left behind is in nobody's way.
    run_ranks(save_thrice, 2, folder)
    assert load_directory(folder / "last.ckpt")["global_step"] == 3
    assert [each.name for each in folder.iterdir()] == ["last.ckpt"]


def save_thrice(rank: int, world_size: int, folder: Path) -> None:
    save(folder, 3)


def save_with_limit(rank: int, world_size: int, folder: Path) -> str:
    save(folder, 1)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    with pytest.raises(CheckpointError) as caught:
        save(folder, 2)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    # All ranks are still there, and together.
    torch.distributed.barrier()
    return str(caught.value)


@pytest.mark.full
@pytest.mark.ranks
def test_a_rank_that_cannot_write_ends_the_save_on_all_ranks(tmp_path: Path) -> None:
    said = run_ranks(save_with_limit, 2, tmp_path)
    for each in said:
        assert "last.ckpt could not be written: File too large (rank 1)" in each
        assert "The checkpoints written before it are intact" in each
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    assert load_directory(tmp_path / "last.ckpt")["global_step"] == 1


def save_large_with_limit(rank: int, world_size: int, folder: Path) -> str:
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    mesh = init_device_mesh("cpu", (world_size,))
    weight = distribute_tensor(torch.ones(1 << 17), mesh, [Shard(0)])
    with pytest.raises(CheckpointError) as caught:
        save_directory({"state_dict": {"weight": weight}}, folder / "last.ckpt")
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    torch.distributed.barrier()
    return str(caught.value)


@pytest.mark.ranks
def test_a_disk_that_fills_within_a_tensor_is_named(tmp_path: Path) -> None:
    for each in run_ranks(save_large_with_limit, 2, tmp_path):
        assert "last.ckpt could not be written: File too large (rank 1)" in each
    assert not list(tmp_path.iterdir())


def save_on_full_disk(rank: int, world_size: int, folder: Path) -> str:
    save(folder, 1)
    if rank == 0:

        def full(path: Path, **kwargs: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        mock.patch.object(directory, "write_manifest", full).start()
    with pytest.raises(CheckpointError) as caught:
        save(folder, 2)
    return str(caught.value)


@pytest.mark.full
@pytest.mark.ranks
def test_a_disk_that_is_full_at_the_very_end_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    for each in run_ranks(save_on_full_disk, 2, tmp_path):
        assert "last.ckpt could not be written" in each
        assert "No space left on device" in each
    assert load_directory(tmp_path / "last.ckpt")["global_step"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_the_newest_checkpoint_is_a_complete_one(tmp_path: Path) -> None:
    folder = tmp_path / "3" / "checkpoints"
    folder.mkdir(parents=True)
    assert newest_checkpoint(tmp_path) is None
    (folder / "old.ckpt").write_bytes(b"a file of Lightning")
    half = folder / "half.ckpt"
    half.mkdir()
    (half / "meta.pt").write_bytes(b"")
    (folder / "new.ckpt.partial").mkdir()
    (folder / "gone.ckpt.removed").mkdir()
    assert find_fault(half) == "it has no manifest.json"
    assert newest_checkpoint(tmp_path) == folder / "old.ckpt"
