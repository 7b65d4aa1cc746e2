"""Shards wait on the disk from the wrapping of their unit until the engine takes them."""

from pathlib import Path

import pytest
import torch

from boltmesh.strategies.offload import stores
from boltmesh.strategies.offload.bucket_layout import collect_sharded_params
from boltmesh.strategies.offload.shard_tensor import OffloadedShard
from boltmesh.strategies.offload.state import Staging
from boltmesh.strategies.torch_compat.tensors import local_tensor
from tests.support.offloaded import WIDTH, full, sharded_net
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")


def _stage(rank: int, world_size: int, folder: Path) -> None:
    stores.SMALL_NUMEL = WIDTH + 1
    net, units = sharded_net()
    other, _ = sharded_net()
    staging = Staging(folder, device=CPU, rank=rank)
    for held in collect_sharded_params(net, units, {}).values():
        staging.add(held)
    x = torch.randn(4, WIDTH)
    for mine, plain in zip(net.parameters(), other.parameters(), strict=True):
        is_staged = isinstance(local_tensor(mine), OffloadedShard)
        assert is_staged == (mine.dim() == 2)  # biases are too small
        assert torch.equal(full(mine), full(plain))
    assert torch.equal(net(x), other(x))  # gathered like any other
    for unit in units.values():
        unit.reshard()
    weight = local_tensor(net.head.weight)
    assert isinstance(weight, OffloadedShard)
    weight.write(torch.full(weight.shape, 3.0))
    assert torch.equal(full(net.head.weight), torch.full((WIDTH, WIDTH), 3.0))
    assert list(folder.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_staged_shards_are_read_gathered_and_written(ranks: int, tmp_path: Path) -> None:
    run_ranks(_stage, ranks, tmp_path)
