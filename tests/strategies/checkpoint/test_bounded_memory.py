"""However much state is kept elsewhere, saving and loading hold one shard of it at a time."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from boltmesh.strategies.checkpoint import chunks
from boltmesh.strategies.checkpoint.directory import load_directory, save_directory
from boltmesh.strategies.offload.shard_tensor import OffloadedShard, ShardSource
from tests.support.ranks import run_ranks

COUNT = 6
ROWS, COLUMNS = 9, 16


class Counted(ShardSource):
    """Remembers how much of what was read or written was in memory at once."""

    seen: ClassVar[list[StorageWeakRef]] = []
    most: ClassVar[int] = 0

    def __init__(self, number: int, shape: tuple[int, ...]) -> None:
        self.name = f"shard {number}"
        self.shape = shape
        self.number = number
        self.num_reads = 0
        self.written: Tensor | None = None

    def count(self, value: Tensor) -> None:
        Counted.seen.append(StorageWeakRef(value.untyped_storage()))
        alive = sum(not each.expired() for each in Counted.seen)
        Counted.most = max(Counted.most, alive)

    def read(self) -> Tensor:
        self.num_reads += 1
        value = torch.arange(torch.Size(self.shape).numel(), dtype=torch.float32)
        value = (value + 1000 * self.number).view(self.shape)
        self.count(value)
        return value

    def write(self, value: Tensor) -> None:
        self.count(value)
        self.written = value.clone()


def make(world_size: int) -> tuple[dict[str, Any], list[Counted]]:
    mesh = init_device_mesh("cpu", (world_size,))
    size = torch.Size((ROWS, COLUMNS))
    rows = len(torch.arange(ROWS).chunk(world_size)[torch.distributed.get_rank()])
    sources = [Counted(number, (rows, COLUMNS)) for number in range(COUNT)]
    state = {}
    for source in sources:
        shard = OffloadedShard.of(source, source.shape, torch.float32, torch.device("cpu"))
        state[f"p{source.number}"] = DTensor.from_local(
            shard, mesh, [Shard(0)], run_check=False, shape=size, stride=(COLUMNS, 1)
        )
    return state, sources


def save_and_load(rank: int, world_size: int, folder: Path) -> Any:
    chunks.PIECE_BYTES = 2 * 4 * COLUMNS  # two rows
    state, sources = make(world_size)
    save_directory({"state_dict": state}, folder / "a.ckpt")
    saved = Counted.most, [each.num_reads for each in sources]
    Counted.most = 0
    stored = load_directory(folder / "a.ckpt")["state_dict"]
    for name, destination in state.items():
        destination.copy_(stored[name])
    is_same = [torch.equal(each.written, each.read()) for each in sources]  # type: ignore[arg-type]
    return saved, Counted.most, is_same


@pytest.mark.ranks
def test_one_shard_at_a_time_is_in_memory_and_each_is_read_once(tmp_path: Path) -> None:
    for (most, reads), most_written, is_same in run_ranks(save_and_load, 2, tmp_path):
        assert most == 1
        assert reads == [1] * COUNT
        assert most_written == 1
        assert is_same == [True] * COUNT
