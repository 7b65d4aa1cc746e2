"""Export and import take the memory of the largest tensor, not that of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from boltmesh.conversion.import_checkpoint import save_alone
from boltmesh.strategies.checkpoint.directory import save_directory
from tests.support.limited_memory import run_limited
from tests.support.ranks import run_ranks

COUNT, MIB = 10, 8
"""Tensors, and MiB of each."""

SCRIPT = """
import sys, warnings
import torch
from pathlib import Path
from boltmesh.conversion.export_checkpoint import export
from boltmesh.conversion.import_checkpoint import save_alone, weights_alone
from boltmesh.conversion.safetensors_files import open_safetensors
from boltmesh.conversion.source import open_checkpoint, open_file, tensors_of

folder, small, allowed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
warnings.simplefilter("ignore", FutureWarning)


def write(source, name):
    export(source, folder / name, prefix=None, max_shard_bytes=None, force=True,
           counted=lambda total: lambda done: None)


def read_in(name):
    # A mapped file counts as private memory, read or not: it is opened before the limit is set.
    if name.endswith(".ckpt"):
        return open_file(folder / name)
    return weights_alone(open_safetensors(folder / name), prefix="model.", ties={})


write(small, "small.ckpt"), write(small, "small")
save_alone(read_in("small.ckpt"), folder / "small-again")
opened = [read_in("large.ckpt"), read_in("large")] if sys.argv[4] == "import" else []
tensors = tensors_of(open_checkpoint(folder / "source"))
allow(allowed)
if opened:
    for number, each in enumerate(opened):
        save_alone(each, folder / f"again-{number}")
else:
    write(folder / "source", "large.ckpt"), write(folder / "source", "large")
try:
    kept = [each.load() for each in tensors.values()]
except (RuntimeError, MemoryError):
    print("the limit holds")
"""


def write_alone(folder: Path, state: dict[str, Tensor]) -> None:
    save_alone({"state_dict": state}, folder)


def write_stage(rank: int, world_size: int, folder: Path) -> None:
    """Two stages of two replicas that share out what their stage has."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    stage = mesh.get_coordinate()[0]  # type: ignore[index]
    own = {
        name: distribute_tensor(each, mesh["data"], [Shard(0)])
        for at, (name, each) in enumerate(tensors().items())
        if at % 2 == stage
    }
    save_directory({"state_dict": own}, folder, is_divided=True)


def write_by_four(folder: Path, state: dict[str, Tensor]) -> None:
    run_ranks(write_stage, 4, folder)


def tensors() -> dict[str, Tensor]:
    rows = MIB << 18
    return {f"model.layer{at}": torch.full((rows,), float(at)) for at in range(COUNT)}


@pytest.mark.full
@pytest.mark.sample("write_by_four-directions1")
@pytest.mark.parametrize(
    ("write", "directions"), [(write_alone, ("export", "import")), (write_by_four, ("export",))]
)
def test_one_tensor_at_a_time_is_in_memory(
    tmp_path: Path, write: Any, directions: tuple[str, ...]
) -> None:
    state = tensors()
    write(tmp_path / "source", state)
    save_alone({"state_dict": {"model.a": torch.ones(3)}}, tmp_path / "small-source")
    # The tensor, and of one piece of it the bytes and what is made of them.
    allowed = 4 * (MIB << 20)
    assert allowed < COUNT * (MIB << 20) // 2
    for direction in directions:
        done = run_limited(SCRIPT, tmp_path, tmp_path / "small-source", allowed, direction)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "the limit holds" in done.stdout
    found = torch.load(tmp_path / "large.ckpt", weights_only=True, mmap=True)["state_dict"]
    assert all(torch.equal(found[name], each) for name, each in state.items())
    if "import" in directions:
        again = {each.name for each in (tmp_path / "again-0").iterdir()}
        assert again >= {"manifest.json", "meta.pt"}
