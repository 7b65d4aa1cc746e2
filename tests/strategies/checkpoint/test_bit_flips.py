"""A flipped bit anywhere in a checkpoint is found before its values are used."""

import io
import random
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from boltmesh.cli import run_command
from boltmesh.conversion.import_checkpoint import save_alone
from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.archive_check import check_values, find_damage
from boltmesh.strategies.checkpoint.directory import find_damage as find_damage_in_directory
from boltmesh.strategies.checkpoint.directory import load_directory
from boltmesh.strategies.checkpoint.file import AtomicCheckpointIO, load_file
from boltmesh.strategies.checkpoint.manifest import MANIFEST, METADATA, REST, find_fault
from boltmesh.strategies.checkpoint.shard_reader import Placeholder

FLIPS = 200
Figure = Callable[[str, int, int], None]


def content() -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = ((64, 300), (300,), (7, 11, 13), (), (0, 4), (1,), (200, 40))
    state = {f"layers.{at}.weight": torch.randn(size) for at, size in enumerate(sizes)}
    moments = {
        number: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(each)}
        for number, each in enumerate(state.values())
    }
    return {
        "epoch": 1,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.4",
        "state_dict": state,
        "optimizer_states": [
            {"state": moments, "param_groups": [{"lr": 0.1, "params": [*moments]}]}
        ],
        "hyper_parameters": {"width": 300, "name": "a"},
    }


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.numpy().tobytes() == other.numpy().tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, each in one.items():
            assert_same(each, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def in_memory(value: Any) -> Any:
    """A checkpoint whose tensors are read."""
    if isinstance(value, Placeholder):
        return value.load()
    if isinstance(value, dict):
        return {key: in_memory(each) for key, each in value.items()}
    return [in_memory(each) for each in value] if isinstance(value, list) else value


def found_of(
    data: bytes, bits: list[int], path: Path, load: Callable[[], Any], wanted: Any
) -> tuple[int, int]:
    """How many flips were found, and how many are of bytes without a meaning."""
    found = without_meaning = 0
    for bit in bits:
        path.write_bytes(flipped(data, bit))
        try:
            loaded = in_memory(load())
        except CheckpointError as error:
            found += str(error).isprintable()
        else:
            assert_same(loaded, wanted)
            without_meaning += 1
    path.write_bytes(data)
    return found, without_meaning


def bits_of_records(path: Path, count: int) -> list[int]:
    """Random bits of what the records of a file hold."""
    data = path.read_bytes()
    spans = []
    for record in zipfile.ZipFile(path).infolist():
        name, extra = (int.from_bytes(data[record.header_offset + at :][:2], "little")
                       for at in (26, 28))  # fmt: skip
        start = record.header_offset + 30 + name + extra
        spans.append(range(8 * start, 8 * (start + record.file_size)))
    chosen = random.Random(1)
    weights = [len(each) for each in spans]
    return [chosen.choice(each) for each in chosen.choices(spans, weights, k=count)]


@pytest.mark.parametrize("is_mapped", [False, True])
def test_flips_in_a_file(is_mapped: bool, tmp_path: Path, figure: Figure) -> None:
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(), path)
    data = path.read_bytes()
    load = lambda: load_file(path, is_mapped=is_mapped)  # noqa: E731
    found, rest = found_of(data, bits_of_records(path, FLIPS), path, load, content())
    assert (found, rest) == (FLIPS, 0)
    figure(f"bit flips in a file {'that is mapped ' * is_mapped}are found", found, FLIPS)
    anywhere = random.Random(2).choices(range(8 * len(data)), k=FLIPS)
    found, rest = found_of(data, anywhere, path, load, content())
    print(f"of {FLIPS} anywhere in it {found} are found, {rest} are padding, and none is wrong")


def test_flips_between_the_records_change_nothing_or_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"weight": torch.arange(5.0), "other": torch.arange(3)}, path)
    wanted = load_file(path)
    data = path.read_bytes()
    bits = [8 * at + random.Random(at).randrange(8) for at in range(len(data))]
    found, rest = found_of(data, bits, path, lambda: load_file(path), wanted)
    assert found + rest == len(data)
    assert found > 400  # each byte of a record, its place, its size, its name


@pytest.mark.parametrize("place", ["memory"])
def test_flips_at_an_address(place: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(), path)
    memory, data = fsspec.filesystem(place), path.read_bytes()
    for bit in bits_of_records(path, 20):
        memory.pipe_file("/flips/a.ckpt", flipped(data, bit))
        with pytest.raises(CheckpointError, match=r"memory://flips/a\.ckpt cannot be loaded"):
            load_file("memory://flips/a.ckpt")
    memory.rm("/flips", recursive=True)


@pytest.mark.parametrize("flips", [60, pytest.param(FLIPS, marks=pytest.mark.full)])
def test_an_import_finds_them(
    flips: int, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, figure: Figure
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("a.ckpt")
    AtomicCheckpointIO().save_checkpoint(content(), path)
    data = path.read_bytes()
    for bit in bits_of_records(path, flips):
        path.write_bytes(flipped(data, bit))
        assert run_command(["import", "a.ckpt", "--to", "b"]) == 2
        assert (
            "a.ckpt cannot be loaded: it was damaged after it was written, "
            in capsys.readouterr().err
        )
        assert not Path("b").exists()
    path.write_bytes(data)
    assert run_command(["import", "a.ckpt", "--to", "b"]) == 0
    figure("bit flips are found by an import", flips, flips)


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA, REST, MANIFEST])
def test_flips_in_a_directory(name: str, tmp_path: Path, figure: Figure) -> None:
    place = tmp_path / "a.ckpt"
    save_alone(content(), place)
    wanted = in_memory(load_directory(place))
    path = place / name
    data = path.read_bytes()
    bits = random.Random(3).choices(range(8 * len(data)), k=FLIPS)
    assert find_damage_in_directory(place, threads=2) is None
    found = 0
    for bit in bits:
        path.write_bytes(flipped(data, bit))
        found += find_damage_in_directory(place, threads=2) is not None
    assert found == FLIPS
    figure(f"bit flips in {name} are found", found, FLIPS)
    # Whoever loads finds them too, but for those in the piece of a tensor without elements.
    found, rest = found_of(data, bits, path, lambda: load_directory(place), wanted)
    assert found + rest == FLIPS
    assert rest <= (FLIPS // 20 if name.endswith(".distcp") else 0)


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    place = tmp_path / "a.ckpt"
    save_alone({"state_dict": {"weight": torch.ones(3)}}, place)
    path = place / MANIFEST
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        path.write_bytes(flipped(data, bit))
        assert find_fault(place, checks_files=False) is not None, bit


def test_a_file_without_checksums_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content(), path)
    finally:
        torch.serialization.set_crc32_options(before)
    with pytest.warns(UserWarning, match="has no checksums"):
        assert_same(load_file(path), content())
    torch.save(content(), path, _use_new_zipfile_serialization=False)
    with pytest.warns(UserWarning, match="has no checksums"):
        assert_same(load_file(path), content())


def test_records_of_more_than_a_buffer_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(torch.zeros(1 << 20), path)
    data = bytearray(path.read_bytes())
    assert find_damage(io.BytesIO(data)) is None
    for at in (1 << 18, 1 << 20, 3 << 20):
        data[at] ^= 128
        assert find_damage(io.BytesIO(data)) is not None
        data[at] ^= 128


@pytest.mark.full
@pytest.mark.alone
def test_a_file_is_checked_as_fast_as_checksums_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({str(at): torch.rand(1 << 22) for at in range(12)}, path)
    chunk = bytes(1 << 18)
    num_bytes, took, alone = path.stat().st_size, [], []
    for _ in range(5):
        began = time.perf_counter()
        with path.open("rb") as file:
            check_values(file, path)
        took.append(time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(num_bytes // len(chunk)):
            zlib.crc32(chunk)
        alone.append(time.perf_counter() - began)
    rates = [num_bytes / min(each) / 1e9 for each in (took, alone)]
    print(f"a file is checked at {rates[0]:.1f} GB/s; checksums alone are made at {rates[1]:.1f}")
    assert rates[0] > rates[1] / 3
