"""Saving and loading move each chunk of a disk once, however many parameters it holds."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import Module

from boltmesh.strategies.checkpoint.directory import load_directory, save_directory
from boltmesh.strategies.checkpoint.optimizer_state import load_states, named_state
from boltmesh.strategies.checkpoint.shard_reader import held
from boltmesh.strategies.offload import stores as stores_module
from boltmesh.strategies.offload.disk.state_store import DiskStateStore
from boltmesh.strategies.offload.shard_tensor import OffloadedShard
from boltmesh.strategies.offload.stores import OffloadPlan
from boltmesh.strategies.torch_compat.tensors import local_tensor
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from tests.support.faulty_disk import EIO, FaultyCalls, failing
from tests.support.offloaded import WIDTH, Twin
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

NUM_CHUNKS = 7
"""More than the ring has buffers; in each a weight and a bias, with two moments of each."""


class Transfers(NullRecorder):
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def offload(
        self, place: str, direction: str, num_bytes: int, seconds: float, *, is_alone: bool = True
    ) -> None:
        self.counts[direction] += 1


def _twin(
    folder: Path, calls: FaultyCalls | None = None
) -> tuple[Twin, Callable[[], Counter[str]]]:
    """A model on disk, and what tells how many chunks were moved since the last time."""
    stores_module.CHUNK_NUMEL = WIDTH * (WIDTH + 1)  # type: ignore[attr-defined]
    twin = Twin(OffloadPlan({"disk": 1.0}, path=folder))
    twin.train(2)
    twin.engine.synchronize()
    (stores,) = twin.engine.kept.stores
    state, swap = stores.states["disk"], stores.swap
    assert isinstance(state, DiskStateStore)
    assert swap is not None
    assert len(state._chunks) == NUM_CHUNKS
    if calls is not None:
        swap.file.calls = calls
    transfers = Transfers()
    swap.recorder = transfers

    def count() -> Counter[str]:
        state.flush()
        counts, transfers.counts = transfers.counts, Counter()
        state._held.clear()  # so that what follows finds nothing in memory
        return counts

    count()
    return twin, count


def _load(twin: Twin, folder: Path) -> None:
    checkpoint = load_directory(folder, checks_files=True)
    weights = {name: held(each) for name, each in checkpoint["state_dict"].items()}
    twin.ours.load_state_dict(weights)
    load_states(twin.ours, [twin.optimizer], checkpoint["optimizer_states"])


def _save(twin: Twin, folder: Path) -> None:
    weights = twin.ours.state_dict(keep_vars=True)
    states = [named_state(twin.ours, twin.optimizer)]
    save_directory({"state_dict": weights, "optimizer_states": states}, folder)


def _save_and_load(rank: int, world_size: int, folder: Path) -> tuple[Counter[str], Counter[str]]:
    twin, count = _twin(folder)
    _save(twin, folder / "checkpoint")
    saved = count()
    _write(_shards(twin.ours))
    count()
    _load(twin, folder / "checkpoint")
    loaded = count()
    assert twin.difference() == 0
    twin.train(2)
    assert twin.difference() == 0
    return saved, loaded


def test_a_save_reads_each_chunk_once_and_a_load_moves_it_once_for_weights_once_for_moments(
    tmp_path: Path,
) -> None:
    ((saved, loaded),) = run_ranks(_save_and_load, 1, tmp_path)
    assert saved == {"read": NUM_CHUNKS}
    assert loaded == {"read": 2 * NUM_CHUNKS, "write": 2 * NUM_CHUNKS}


def _shards(module: Module) -> list[OffloadedShard]:
    shards = [local_tensor(each) for each in module.parameters()]
    return [each for each in shards if isinstance(each, OffloadedShard)]


def _step_after_writing(rank: int, world_size: int, folder: Path) -> None:
    twin, count = _twin(folder)
    shards = _shards(twin.ours)
    for shard in shards:
        shard.write(shard.read() + 1)
    state = twin.engine.kept.stores[0].states["disk"]
    assert isinstance(state, DiskStateStore)
    assert sum(held.is_deferred for held in state._held.values()) == 1
    with torch.no_grad():
        for reference, shard in zip(twin.reference.parameters(), shards, strict=True):
            local_tensor(reference).add_(1)
            assert torch.equal(local_tensor(reference), shard.read())
    for _ in range(3):
        twin.train(1)
        assert twin.difference() == 0
        count()


@pytest.mark.full
def test_a_step_goes_on_from_what_was_written_in_memory_and_not_yet_on_disk(tmp_path: Path) -> None:
    run_ranks(_step_after_writing, 1, tmp_path)


def _write(shards: list[OffloadedShard]) -> None:
    for shard in shards:
        shard.write(torch.zeros(shard.shape))


def _step(twin: Twin) -> None:
    twin.train(1)
    twin.engine.synchronize()


def _write_on_failing_disk(rank: int, world_size: int, folder: Path) -> None:
    calls = FaultyCalls()
    twin, _ = _twin(folder, calls)
    shards = _shards(twin.ours)
    calls.before_write = failing(EIO)
    with pytest.raises(OSError, match=r"could not write chunk .*\(EIO\)"):
        _write(shards)
    calls.before_write = None
    with pytest.raises(OSError, match=r"could not write chunk .*\(EIO\)"):
        shards[-1].read()
    with pytest.raises(OSError, match=r"could not write chunk .*\(EIO\)"):
        _step(twin)


@pytest.mark.full
def test_a_chunk_that_could_not_be_written_ends_the_load_and_every_later_step(
    tmp_path: Path,
) -> None:
    run_ranks(_write_on_failing_disk, 1, tmp_path)
