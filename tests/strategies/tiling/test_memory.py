"""A layer in tiles takes the memory of its shard, its shard's gradient and a few tiles."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from boltmesh.strategies.tiling.apply import apply_tiling
from tests.benchmarks.peers.resident import resident_bytes
from tests.support.ranks import run_ranks

MIB = 1 << 20
ROWS, COLUMNS = 16384, 1024
WEIGHT = 4 * ROWS * COLUMNS
TILE = 2 * MIB
M_MMAP_THRESHOLD = -3
"""glibc's number for the size from which on memory is the system's."""


def peak_of_step(rank: int, world_size: int, is_tiled: bool) -> int:
    """What a forward and a backward pass take beside the shards."""
    # What is freed is given back at once then, so the peak is of what is in use.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
    mesh = init_device_mesh("cpu", (world_size,))
    warm = nn.Linear(COLUMNS, ROWS // 8, bias=False)
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    for each in (warm, layer):
        tiled = apply_tiling(each, TILE, mesh) if is_tiled else []
        fully_shard(each, mesh=mesh, ignored_params={t.parameter for t in tiled})
    warm(torch.randn(4, COLUMNS, requires_grad=True)).square().mean().backward()
    warm.weight.grad = None
    inputs = torch.randn(4, COLUMNS, requires_grad=True)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    layer(inputs).square().mean().backward()
    assert layer.weight.grad is not None
    return resident_bytes("VmHWM") - before


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_tile_is_gathered_at_a_time() -> None:
    gradient = WEIGHT // 2
    whole = run_ranks(peak_of_step, 2, False)
    tiled = run_ranks(peak_of_step, 2, True)
    assert min(whole) >= 2 * WEIGHT  # gathered, and its gradient, before the shards of that
    # Two gathered tiles, two of gradients, their sent pieces; code that is loaded on first use.
    assert max(tiled) <= gradient + 6 * TILE + 8 * MIB
