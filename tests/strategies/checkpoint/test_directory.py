"""A directory of shards holds what was saved, for every other number of ranks."""

import json
import os
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint import chunks
from boltmesh.strategies.checkpoint.directory import find_damage, load_directory, save_directory
from boltmesh.strategies.checkpoint.manifest import MANIFEST, METADATA, REST, find_fault
from boltmesh.strategies.checkpoint.optimizer_state import load_state, named_state
from boltmesh.strategies.checkpoint.shard_reader import Placeholder, held
from tests.support.ranks import RankFailure, run_ranks
from tests.support.sharded import Odd, adamw, build, train, whole

REPLICATED = {4: 2}
"""Ranks of a job, and in how many groups they hold the same shards."""


def snapshot(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything, whole, on every rank."""
    return {
        "model": whole(dict(module.state_dict())),
        "optimizer": whole(named_state(module, optimizer)),
    }


def save(rank: int, world_size: int, folder: Path, replicate: int = 1) -> dict[str, Any]:
    module = build(replicate=replicate)
    optimizer = adamw(module)
    train(module, optimizer, 3)
    checkpoint = {
        "state_dict": module.state_dict(keep_vars=True),
        "optimizer_states": [named_state(module, optimizer)],
        "global_step": 3,
    }
    save_directory(checkpoint, folder / "a.ckpt")
    return snapshot(module, optimizer)


def restore(folder: Path, module: nn.Module) -> torch.optim.Optimizer:
    checkpoint = load_directory(folder / "a.ckpt")
    assert checkpoint["global_step"] == 3
    module.load_state_dict(checkpoint["state_dict"])
    optimizer = adamw(module)
    load_state(module, optimizer, checkpoint["optimizer_states"][0])
    return optimizer


def load(rank: int, world_size: int, folder: Path, replicate: int = 1) -> dict[str, Any]:
    module = build(seed=1, replicate=replicate)
    return snapshot(module, restore(folder, module))


def load_whole(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(1)
    module = Odd()
    return snapshot(module, restore(folder, module))


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for at, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_equal(left, right, f"{where}.{at}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
        assert one.dtype == other.dtype, where
    else:
        assert one == other, where


@pytest.mark.sample("2")
@pytest.mark.ranks
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_any_number_of_ranks_loads_what_any_other_has_saved(tmp_path: Path, writers: int) -> None:
    replicate = REPLICATED.get(writers, 1)
    saved = run_ranks(save, writers, tmp_path, replicate)[0]
    assert len(saved["optimizer"]["state"]) == 7
    for readers in (1, 2, 3):
        for loaded in run_ranks(load, readers, tmp_path):
            assert_equal(loaded, saved)
    assert_equal(run_ranks(load_whole, 1, tmp_path)[0], saved)


@pytest.mark.full
@pytest.mark.ranks
def test_groups_that_hold_the_same_shards_write_them_once(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path / "two")
    run_ranks(save, 4, tmp_path / "four", 2)
    sizes = [
        sum(each.stat().st_size for each in (tmp_path / name / "a.ckpt").glob("*.distcp"))
        for name in ("two", "four")
    ]
    assert sizes[0] == sizes[1]
    assert len(list((tmp_path / "four/a.ckpt").glob("*.distcp"))) == 4
    loaded = run_ranks(load, 4, tmp_path / "two", 2)
    for each in loaded:
        assert_equal(each, loaded[0])


def save_in_small_pieces(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    chunks.PIECE_BYTES = 24
    return save(rank, world_size, folder)


@pytest.mark.full
@pytest.mark.ranks
def test_large_shards_are_written_in_pieces_and_read_in_part(tmp_path: Path) -> None:
    saved = run_ranks(save_in_small_pieces, 2, tmp_path)[0]
    entry = torch_metadata(tmp_path).state_dict_metadata["state_dict.embedding.weight"]
    assert len(entry.chunks) == 7  # rows of 20 bytes
    for loaded in run_ranks(load, 3, tmp_path):
        assert_equal(loaded, saved)


def torch_metadata(folder: Path) -> Any:
    return FileSystemReader(folder / "a.ckpt").read_metadata()


@pytest.mark.ranks
def test_plain_torch_reads_what_is_written(tmp_path: Path) -> None:
    saved = run_ranks(save, 2, tmp_path)[0]
    dcp_to_torch_save(tmp_path / "a.ckpt", tmp_path / "a.pt")
    read = torch.load(tmp_path / "a.pt")
    del saved["model"]["head.weight"]  # it is tied
    assert_equal(read["state_dict"], saved["model"])
    for state in saved["optimizer"]["state"].values():
        del state["step"]
    assert_equal(read["optimizer_0"]["state"], saved["optimizer"]["state"])


@pytest.mark.full
@pytest.mark.ranks
def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path)
    state = load_directory(tmp_path / "a.ckpt")["state_dict"]
    assert state["head.weight"] is state["embedding.weight"]
    assert set(state) == set(Odd().state_dict())
    assert "state_dict.head.weight" not in torch_metadata(tmp_path).state_dict_metadata


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    run_ranks(save, 2, tmp_path)
    return tmp_path / "a.ckpt"


@pytest.mark.ranks
def test_a_directory_that_is_not_whole_is_refused_by_what_it_lacks(directory: Path) -> None:
    assert find_fault(directory) is None
    for name, fault in (
        (MANIFEST, "it has no manifest.json"),
        (REST, "meta.pt is not there"),
        (METADATA, ".metadata is not there"),
        ("__1_0.distcp", "__1_0.distcp is not there"),
    ):
        copy = directory.with_name("copy.ckpt")
        shutil.copytree(directory, copy)
        (copy / name).unlink()
        with pytest.raises(CheckpointError, match=f"no complete checkpoint: {fault}"):
            load_directory(copy)
        shutil.rmtree(copy)
    with (directory / "__0_0.distcp").open("ab") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 100 bytes instead of"):
        load_directory(directory)


@pytest.mark.ranks
def test_a_changed_bit_is_found_where_it_is(directory: Path) -> None:
    def flip(path: Path, at: int) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    shard = directory / "__1_0.distcp"
    flip(shard, shard.stat().st_size // 2)
    checkpoint = load_directory(directory)
    values = list(checkpoint["state_dict"].values())
    for state in checkpoint["optimizer_states"][0]["state"].values():
        values += [each for each in state.values() if isinstance(each, Placeholder)]

    def load_all() -> None:
        for each in values:
            each.load()

    with pytest.raises(CheckpointError, match=r"__1_0\.distcp was damaged .* the checksum of '"):
        load_all()
    for name in (REST, METADATA):
        flip(directory / name, (directory / name).stat().st_size // 2)
        with pytest.raises(CheckpointError, match=f"{name} was damaged"):
            load_directory(directory)
        flip(directory / name, (directory / name).stat().st_size // 2)


@pytest.mark.full
@pytest.mark.ranks
def test_a_shard_of_another_save_is_refused_though_it_has_the_same_length(
    tmp_path: Path, directory: Path
) -> None:
    run_ranks(save, 2, tmp_path / "other")
    other = tmp_path / "other" / "a.ckpt" / "__1_0.distcp"
    shard = directory / "__1_0.distcp"
    assert other.stat().st_size == shard.stat().st_size
    for source in (other, directory / "__0_0.distcp"):
        found = source.read_bytes()[: shard.stat().st_size].ljust(shard.stat().st_size, b"-")
        shard.write_bytes(found)
        assert find_fault(directory) is None
        said = find_damage(directory)
        assert said is not None
        assert "__1_0.distcp was damaged after it was written, or is of another save" in said


@pytest.mark.full
@pytest.mark.ranks
def test_pipes_links_and_names_outside_of_the_folder_are_refused_at_once(
    tmp_path: Path, directory: Path
) -> None:
    shard, content = directory / "__1_0.distcp", (directory / MANIFEST).read_text()
    kept = shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(kept)
    assert find_fault(directory) == "__1_0.distcp cannot be read (it is a link out of the folder)"
    shard.unlink()
    kept.rename(directory / "kept")
    shard.symlink_to("kept")
    assert find_fault(directory) is None
    assert find_damage(directory) is None
    shard.unlink()
    os.mkfifo(shard)
    assert find_fault(directory) == "__1_0.distcp cannot be read (it is not a plain file)"
    for name in (MANIFEST, REST):
        (directory / name).unlink()
        os.mkfifo(directory / name)
    assert find_fault(directory) == "its manifest.json cannot be read (it is not a plain file)"
    shutil.rmtree(directory)
    directory.mkdir()
    for change in ({"within": "../other/"}, {"files": {"../a": {"bytes": 1}}}):
        changed = {**json.loads(content), **change}
        del changed["crc32"], changed["save"]
        (directory / MANIFEST).write_text(json.dumps({**changed, "format": 2}))
        assert find_fault(directory) == "its manifest.json names a file outside of the folder"


class Kills:
    """What no checkpoint may do when it is loaded."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code of a checkpoint was run')",))


def save_code(rank: int, world_size: int, folder: Path) -> None:
    save_directory({"state_dict": {}, "hyper_parameters": {"a": Kills()}}, folder / "a.ckpt")


@pytest.mark.ranks
def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, directory: Path) -> None:
    run_ranks(save_code, 1, tmp_path / "bad")
    with pytest.raises(CheckpointError, match="among the hyper-parameters"):
        load_directory(tmp_path / "bad" / "a.ckpt")
    # The metadata of torch is a pickle, which weights_only does not cover.
    data = pickle.dumps(Kills())
    (directory / METADATA).write_bytes(data)
    manifest = json.loads((directory / MANIFEST).read_text())
    del manifest["crc32"], manifest["save"]  # as earlier versions wrote it
    manifest["format"] = 1
    manifest["files"][METADATA] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (directory / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"builtins\.exec has no place in it"):
        load_directory(directory)


def save_shard_in_callback(rank: int, world_size: int, folder: Path) -> None:
    module = build()
    state = {"callbacks": {"ema": [module.hidden.weight]}, "state_dict": {}}
    save_directory(state, folder / "a.ckpt")


@pytest.mark.full
@pytest.mark.ranks
def test_a_shard_outside_of_model_and_optimizer_is_refused_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"checkpoint\['callbacks'\]\['ema'\]\[0\] is a shard"):
        run_ranks(save_shard_in_callback, 2, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_value_computed_from_a_placeholder_is_refused() -> None:
    placeholder = held(torch.arange(6.0).view(3, 2))
    assert placeholder.shape == (3, 2)
    assert placeholder.load().tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(CheckpointError, match=r"Call load\(\) on the tensor"):
        torch.zeros(3, 2).copy_(placeholder * 2)
