"""Parts of tensors are stored where they lie in the whole, whatever ranks divide them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint import chunks
from boltmesh.strategies.checkpoint.chunks import DimDivision, ElementStretch, TensorPart
from boltmesh.strategies.checkpoint.directory import load_directory, save_directory
from boltmesh.strategies.checkpoint.shard_reader import divided
from boltmesh.strategies.tensor.plan import Section, runs
from tests.support.ranks import run_ranks

PATTERNS: dict[str, tuple[int, list[Section]]] = {
    "fused q, k, v": (0, [Section(1, 4, 3)] * 3),
    "grouped heads": (0, [Section(1, 8, 3), Section(1, 4, 3), Section(1, 4, 3)]),
    "q, k, v outside of the heads": (0, [Section(3, 4, 2)]),
    "interleaved": (0, [Section(1, 4, 9)]),
    "rows": (1, [Section(1, 8, 2)]),
    "gate and up, transposed": (1, [Section(1, 4, 5)] * 2),
    "experts": (2, [Section(1, 4, 3)]),
}


def whole_tensors() -> dict[str, Tensor]:
    found = {}
    for at, (name, (dim, sections)) in enumerate(PATTERNS.items()):
        sizes = [5, 7, 3][: max(2, dim + 1)]
        sizes[dim] = sum(each.length for each in sections)
        generator = torch.Generator().manual_seed(at)
        found[name] = torch.randn(sizes, generator=generator)
    return found


def division_of(name: str, size: int, rank: int) -> DimDivision:
    dim, sections = PATTERNS[name]
    shape = whole_tensors()[name].shape
    stretches = (
        ElementStretch(e.start, e.local_start, e.length) for e in runs(sections, size, rank)
    )
    return DimDivision(shape, dim, tuple(stretches))


def by_definition(name: str, size: int, rank: int) -> Tensor:
    """This rank's part as the plan describes it: of each section its share of the counted units."""
    dim, sections = PATTERNS[name]
    base, kept = 0, []
    for each in sections:
        places = base + torch.arange(each.length).view(
            each.outer, size, each.count // size, each.inner
        )
        kept.append(places[:, rank].reshape(-1))
        base += each.length
    return whole_tensors()[name].index_select(dim, torch.cat(kept))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_division_keeps_its_units_and_together_they_are_the_whole(name: str, size: int) -> None:
    value = whole_tensors()[name]
    joined = torch.full_like(value, torch.nan)
    for rank in range(size):
        division = division_of(name, size, rank)
        part = division.cut(value)
        assert part.shape == division.local_shape
        assert torch.equal(part, by_definition(name, size, rank))
        division.put(part, joined)
    assert torch.equal(joined, value)


def save(rank: int, world_size: int, folder: Path, size: int) -> None:
    """As ``world_size / size`` replicas of a tensor group would."""
    state: dict[str, Any] = {"plain": torch.arange(3.0)}
    for name, value in whole_tensors().items():
        division = division_of(name, size, rank % size)
        state[name] = TensorPart.of(division.cut(value), division)
    state["second name"] = state["rows"]
    save_directory({"state_dict": state}, folder / "a.ckpt")


def load(rank: int, world_size: int, folder: Path, size: int) -> list[str]:
    state = load_directory(folder / "a.ckpt")["state_dict"]
    wrong = []
    for name in PATTERNS:
        division = division_of(name, size, rank % size)
        own = torch.full(division.local_shape, torch.nan)
        own.copy_(divided(state[name], division, name))
        if not torch.equal(own, by_definition(name, size, rank % size)):
            wrong.append(f"{name} on rank {rank}")
    return wrong


@pytest.mark.ranks
def test_every_layout_reads_what_any_has_written(tmp_path: Path) -> None:
    wrong = []
    for saving, size in ((4, 4), (4, 2), (2, 2)):
        folder = tmp_path / f"{saving}-{size}"
        run_ranks(save, saving, folder, size)
        state = load_directory(folder / "a.ckpt")["state_dict"]
        for name, value in whole_tensors().items():
            assert torch.equal(state[name].load(), value), name
        assert torch.equal(state["second name"].load(), whole_tensors()["rows"])
        wrong += [each for rank in run_ranks(load, 4, folder, 4) for each in rank]
        wrong += [each for rank in run_ranks(load, 2, folder, 2) for each in rank]
        wrong += load(0, 1, folder, 1)
    assert wrong == []


def shards_of_parts(rank: int, world_size: int, folder: Path) -> list[str]:
    """Tensor size 2, and each part sharded over two ranks of data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    division = {name: division_of(name, 2, rank % 2) for name in PATTERNS}
    kept = {
        name: distribute_tensor(division[name].cut(value), mesh["data"], [Shard(0)])
        for name, value in whole_tensors().items()
    }
    state = {name: TensorPart.of(each, division[name]) for name, each in kept.items()}
    save_directory({"state_dict": state}, folder / "a.ckpt")
    stored = load_directory(folder / "a.ckpt")["state_dict"]
    wrong = []
    for name, each in kept.items():
        before = each.to_local().clone()
        each.to_local().fill_(torch.nan)
        each.copy_(divided(stored[name], division[name], name))
        if not torch.equal(each.to_local(), before):
            wrong.append(name)
    return wrong


@pytest.mark.full
@pytest.mark.ranks
def test_parts_that_are_sharded_again_are_stored_by_both(tmp_path: Path) -> None:
    assert [each for rank in run_ranks(shards_of_parts, 4, tmp_path) for each in rank] == []
    state = load_directory(tmp_path / "a.ckpt")["state_dict"]
    for name, value in whole_tensors().items():
        assert torch.equal(state[name].load(), value), name


@pytest.mark.full
@pytest.mark.ranks
def test_large_parts_are_written_in_pieces(tmp_path: Path) -> None:
    run_ranks(save_in_small_pieces, 2, tmp_path)
    state = load_directory(tmp_path / "a.ckpt")["state_dict"]
    for name, value in whole_tensors().items():
        assert torch.equal(state[name].load(), value), name


def save_in_small_pieces(rank: int, world_size: int, folder: Path) -> None:
    chunks.PIECE_BYTES = 40
    save(rank, world_size, folder, world_size)


def test_a_tensor_of_another_whole_is_refused_by_name() -> None:
    division = division_of("rows", 2, 0)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.out has the shape \(5, 8\)"):
        divided(torch.zeros(5, 8), division, "blocks.0.out")


def test_what_was_computed_from_a_part_is_not_stored() -> None:
    division = division_of("rows", 2, 0)
    part = TensorPart.of(torch.zeros(division.local_shape), division)
    with pytest.raises(CheckpointError, match="has a part"):
        chunks.own_chunks(part * 2)
