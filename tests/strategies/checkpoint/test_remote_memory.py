"""A rank streams its shards to and from a remote file system; it never holds all of them twice."""

from pathlib import Path

import pytest

from tests.support.limited_memory import run_limited

COUNT, MIB = 10, 8
"""Tensors, and MiB of each; one is one piece."""

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from pathlib import Path
from boltmesh.strategies.checkpoint.directory import load_directory, save_directory
from tests.support.object_store import install

install(Path(sys.argv[1]))
count, numel, allowed = (int(each) for each in sys.argv[2:])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
state = {f"layer{at}": torch.full((numel,), float(at)) for at in range(count)}
other = {name: torch.zeros_like(each) for name, each in state.items()}


def go(given, taken, address):
    save_directory({"state_dict": given}, address)
    stored = load_directory(address)["state_dict"]
    for name, each in taken.items():
        each.copy_(stored[name])


go({"small": torch.ones(3)}, {"small": torch.zeros(3)}, "objects://bucket/small.ckpt")
allow(allowed)
go(state, other, "objects://bucket/large.ckpt")
assert all(torch.equal(each, other[name]) for name, each in state.items())
try:
    kept = [each.clone() for each in state.values()]
except (RuntimeError, MemoryError):
    print("the limit holds")
"""


@pytest.mark.full
def test_one_piece_at_a_time_is_on_its_way(tmp_path: Path) -> None:
    # The piece, what torch makes of it, and what the file system's own library holds of it, twice.
    allowed = 4 * (MIB << 20)
    assert allowed < COUNT * (MIB << 20) // 2
    done = run_limited(SCRIPT, tmp_path / "store", COUNT, MIB << 18, allowed)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the limit holds" in done.stdout
