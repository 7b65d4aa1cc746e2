"""Files written tensor by tensor are those that torch.save would have written."""

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from boltmesh.conversion.export_checkpoint import ALIGNMENT_BYTES, write_archive
from boltmesh.conversion.source import load_value
from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.shard_reader import Placeholder

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def written(value: Any, path: Path) -> Path:
    def load(tensor: Tensor) -> Tensor:
        return load_value(tensor, "a tensor")

    with path.open("wb") as file:
        write_archive(value, file, load=load, progress=lambda _: None)
    return path


def same(one: Tensor, other: Tensor) -> bool:
    is_like = one.dtype == other.dtype and one.shape == other.shape
    return is_like and one.untyped_storage().tolist() == other.untyped_storage().tolist()


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_every_dtype_and_shape(tmp_path: Path, mmap: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    content: dict[str, Any] = {}
    for dtype in DTYPES:
        for shape in [(3, 5), (), (0, 2), (1,)]:
            count = torch.Size(shape).numel() * dtype.itemsize
            data = torch.randint(2, (count,), dtype=torch.uint8, generator=generator)
            content[f"{dtype} {shape}"] = data.view(dtype).reshape(shape)
    path = written({"nested": [content, (1, "two", None)], "step": 3}, tmp_path / "file.ckpt")
    found = torch.load(path, weights_only=True, mmap=mmap)
    assert found["step"] == 3
    assert found["nested"][1] == (1, "two", None)
    assert found["nested"][0].keys() == content.keys()
    assert [
        name for name, each in content.items() if not same(found["nested"][0][name], each)
    ] == []


def test_other_readers_find_a_sound_archive_with_aligned_tensors(tmp_path: Path) -> None:
    path = written([torch.arange(5), torch.ones(3, 3)], tmp_path / "file.ckpt")
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        record = archive.getinfo("archive/data/1")
        archive.read(record)
    data = path.read_bytes()
    at = data.index(torch.ones(3, 3).numpy().tobytes())
    assert at % ALIGNMENT_BYTES == 0
    assert record.compress_type == zipfile.ZIP_STORED


def test_tied_tensors_share_their_storage_again(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)

    def fill(destination: Tensor) -> None:
        destination.copy_(weight)

    placeholder = Placeholder.of(weight.shape, weight.dtype, fill)
    views = {"a": weight, "b": weight.detach(), "c": placeholder, "d": placeholder}
    found = torch.load(written(views, tmp_path / "file.ckpt"), weights_only=True)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert found["c"].data_ptr() == found["d"].data_ptr() != found["a"].data_ptr()
    assert all(torch.equal(each, weight) for each in found.values())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch 2.11
def test_what_is_no_plain_tensor_is_what_it_was(tmp_path: Path) -> None:
    dense = torch.eye(4)
    content = OrderedDict(
        parameter=nn.Parameter(torch.ones(2)),
        sparse=dense.to_sparse(),
        transposed=torch.arange(6.0).view(2, 3).t(),
        random=torch.get_rng_state(),
    )
    found = torch.load(written(content, tmp_path / "file.ckpt"), weights_only=True)
    assert isinstance(found, OrderedDict)
    assert isinstance(found["parameter"], nn.Parameter)
    assert found["parameter"].requires_grad
    assert torch.equal(found["sparse"].to_dense(), dense)
    assert torch.equal(found["transposed"], content["transposed"])
    assert torch.equal(found["random"], content["random"])


def test_what_cannot_be_written_by_pieces_is_refused(tmp_path: Path) -> None:
    storage = torch.ones(2).untyped_storage()  # a quantized tensor has one that is seen as well
    with pytest.raises(ConfigError, match="quantized"):
        written({"weight": storage}, tmp_path / "file.ckpt")
