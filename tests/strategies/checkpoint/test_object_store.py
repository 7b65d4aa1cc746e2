"""On a remote file system, which cannot rename, a checkpoint is complete or absent all the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.directory import is_directory, load_directory, save_directory
from boltmesh.strategies.checkpoint.manifest import find_fault
from boltmesh.strategies.checkpoint.storage.folder import folder_at
from tests.support.object_store import ObjectStore, install, keys
from tests.support.ranks import run_ranks
from tests.support.sharded import build

ADDRESS = "objects://bucket/last.ckpt"
FILES = {".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "meta.pt"}


def save(step: int, address: str = ADDRESS) -> None:
    module = build(seed=step)
    checkpoint = {"state_dict": module.state_dict(keep_vars=True), "global_step": step}
    save_directory(checkpoint, address)


def step_of(address: str = ADDRESS) -> int:
    """Load all of it; its weights have to be those of its step."""
    checkpoint = load_directory(address)
    step = int(checkpoint["global_step"])
    torch.manual_seed(step)
    expected = torch.nn.Embedding(7, 5).weight
    assert torch.equal(checkpoint["state_dict"]["embedding.weight"].load(), expected)
    return step


def failing(action: str, ending: str) -> Any:
    def fail(asked: str, key: str) -> None:
        if asked == action and key.endswith(ending):
            raise RuntimeError("the line is cut")  # of no class that boltmesh could know

    return fail


def replace_again_and_again(rank: int, world_size: int, store: Path) -> None:
    install(store)
    for step in (1, 2, 3):
        save(step)
        assert find_fault(ADDRESS) is None
        assert step_of() == step
        torch.distributed.barrier()
        # Of what was replaced nothing is left.
        assert len(keys(store)) == len(FILES)
        if step == 1:
            assert keys(store) == {f"bucket/last.ckpt/{name}" for name in FILES}
        torch.distributed.barrier()
    if rank == 0:
        folder_at(ADDRESS).remove()
        assert not keys(store)
    torch.distributed.barrier()
    assert not is_directory(ADDRESS)


@pytest.mark.ranks
def test_a_new_checkpoint_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    run_ranks(replace_again_and_again, 2, tmp_path / "store")


def fail_everywhere(rank: int, world_size: int, store: Path) -> None:
    install(store)
    faults = [
        (0, "put", "__0_0.distcp"),
        (1, "put", "__1_0.distcp"),
        (0, "part", ".metadata"),
        (0, "put", "meta.pt"),
        (0, "put", "manifest.json"),
    ]
    for address, step in ((f"{ADDRESS}/new", None), (ADDRESS, 1)):
        if step is not None:
            save(step, address)
        before = keys(store)
        torch.distributed.barrier()
        for failing_rank, action, ending in faults:
            if rank == failing_rank:
                ObjectStore.before = staticmethod(failing(action, ending))
            with pytest.raises(CheckpointError, match=r"the line is cut \(rank") as caught:
                save(2, address)
            assert "The checkpoints written before it are intact" in str(caught.value)
            ObjectStore.before = None
            torch.distributed.barrier()
            assert keys(store) == before
            if step is not None:
                assert step_of(address) == step
            torch.distributed.barrier()
    # What could not be taken away either is in nobody's way: it is no checkpoint, and goes later.
    if rank == 0:
        ObjectStore.before = staticmethod(cut_for_good)
    with pytest.raises(CheckpointError, match="the line is cut"):
        save(2)
    ObjectStore.before = None
    torch.distributed.barrier()
    assert len(keys(store)) > len(FILES)
    assert step_of() == 1
    torch.distributed.barrier()
    save(3)
    assert step_of() == 3
    torch.distributed.barrier()
    assert len(keys(store)) == len(FILES)


def cut_for_good(asked: str, key: str) -> None:
    if asked == "delete" or (asked == "put" and key.endswith("manifest.json")):
        raise RuntimeError("the line is cut")


@pytest.mark.ranks
def test_a_put_that_fails_leaves_the_checkpoint_of_before(tmp_path: Path) -> None:
    run_ranks(fail_everywhere, 2, tmp_path / "store")


class OneListingFails:
    """The Nth listing from now."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, asked: str, key: str) -> None:
        if asked == "list":
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("the line is cut")


def listings_fail(rank: int, world_size: int, store: Path) -> None:
    install(store)
    save(1)
    for number in range(1, 50):
        ObjectStore.before = failing_once = OneListingFails(number)
        said = "the line is cut"
        try:
            save(1 + number)
        except CheckpointError as error:
            said = str(error)
        ObjectStore.before = None
        assert "the line is cut" in said
        assert step_of() in {number, 1 + number}
        save(1 + number)
        if failing_once.left > 0:
            break
    assert number > 3, "several listings failed"
    ObjectStore.before = OneListingFails(1)
    with pytest.raises(OSError, match="the line is cut"):
        is_directory(ADDRESS)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*files of the checkpoint .* not be deleted")
def test_a_listing_that_fails_is_not_taken_for_an_empty_store(tmp_path: Path) -> None:
    run_ranks(listings_fail, 1, tmp_path / "store")


def save_apart(rank: int, world_size: int, folder: Path) -> str:
    install(folder / f"store {rank}")
    with pytest.raises(CheckpointError) as caught:
        save(1)
    return str(caught.value)


@pytest.mark.full
@pytest.mark.ranks
def test_ranks_that_see_different_stores_are_told_before_they_write(tmp_path: Path) -> None:
    for said in run_ranks(save_apart, 2, tmp_path):
        assert "rank 0 has made a folder there that this rank does not see" in said
        assert "(rank 1)" in said
    assert not keys(tmp_path / "store 0")
    assert not keys(tmp_path / "store 1")


def load_everything() -> None:
    for each in load_directory(ADDRESS)["state_dict"].values():
        each.load()


def take_a_file_s_name(rank: int, world_size: int, store: Path) -> None:
    install(store)
    folder_at("objects://bucket")
    (store / "bucket%2Flast.ckpt").write_bytes(b"a file")
    with pytest.raises(CheckpointError, match="a file has this name"):
        save(1)
    assert keys(store) == {"bucket/last.ckpt"}
    (store / "bucket%2Flast.ckpt").unlink()
    save(1)
    # Damage is told as on a disk.
    shards = store / "bucket%2Flast.ckpt%2F__0_0.distcp"
    data = bytearray(shards.read_bytes())
    data[len(data) // 2] ^= 8
    shards.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{ADDRESS}/__0_0.distcp was dam"):
        load_everything()
    shards.write_bytes(data[:-1])
    assert find_fault(ADDRESS) == f"__0_0.distcp has {len(data) - 1} bytes instead of {len(data)}"


@pytest.mark.full
@pytest.mark.ranks
def test_what_is_no_complete_directory_is_told(tmp_path: Path) -> None:
    run_ranks(take_a_file_s_name, 1, tmp_path / "store")
