"""Export and import take the memory of the largest tensor, not that of the model."""

from pathlib import Path

import torch

from boltmesh.conversion.importing import save_alone
from tests.support.limited_memory import run_limited

COUNT, MIB = 10, 8
"""Tensors, and MiB of each."""

SCRIPT = """
import sys, warnings
import torch
from pathlib import Path
from boltmesh.conversion.exporting import export
from boltmesh.conversion.importing import save_alone, weights_alone
from boltmesh.conversion.safetensors_source import open_safetensors
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


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    rows = MIB << 18
    state = {f"model.layer{at}": torch.full((rows,), float(at)) for at in range(COUNT)}
    save_alone({"state_dict": state}, tmp_path / "source")
    save_alone({"state_dict": {"model.a": torch.ones(3)}}, tmp_path / "small-source")
    # The tensor, and of one piece of it the bytes and what is made of them.
    allowed = 4 * (MIB << 20)
    assert allowed < COUNT * (MIB << 20) // 2
    for direction in ("export", "import"):
        done = run_limited(SCRIPT, tmp_path, tmp_path / "small-source", allowed, direction)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "the limit holds" in done.stdout
    found = torch.load(tmp_path / "large.ckpt", weights_only=True, mmap=True)["state_dict"]
    assert all(torch.equal(found[name], each) for name, each in state.items())
    assert {each.name for each in (tmp_path / "again-0").iterdir()} >= {"manifest.json", "meta.pt"}
