"""A shard without storage reads true, gathers true, and refuses what would be lost."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from boltmesh.errors import OffloadError
from boltmesh.strategies.offload.shard_tensor import OffloadedShard, ShardSource

SHAPE = (5, 3)


class Kept(ShardSource):
    """Keeps the value in plain sight and counts who asks."""

    name = "net.weight"

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.num_reads = 0

    @override
    def read(self) -> Tensor:
        self.num_reads += 1
        return self.value

    @override
    def write(self, value: Tensor) -> None:
        self.value.copy_(value)


@pytest.fixture
def source() -> Kept:
    return Kept(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def shard(source: Kept) -> OffloadedShard:
    return OffloadedShard.of(source, SHAPE, torch.float32, torch.device("cpu"))


def test_it_owns_one_element_and_looks_like_the_shard(shard: OffloadedShard) -> None:
    assert shard.untyped_storage().nbytes() == 4
    assert (shard.shape, shard.dtype, shard.device.type) == (SHAPE, torch.float32, "cpu")
    assert "net.weight" in repr(shard)


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(),
    "times": lambda t: t * 2,
    "times from the left": lambda t: torch.ones(2, 5) @ t,
    "norm": lambda t: torch.linalg.vector_norm(t),
    "clone": lambda t: t.clone(),
    "clone of detached": lambda t: t.detach().clone(),
    "contiguous": lambda t: t.contiguous(),
    "another type": lambda t: t.double(),
    "stack": lambda t: torch.stack([t, t]),
    "copied into": lambda t: torch.zeros(SHAPE).copy_(t),
    "as it is": lambda t: t.view_as(t) + 0,
    "foreach": lambda t: torch.stack(torch._foreach_norm([t, t])),
}


@pytest.mark.parametrize("name", READS)
def test_whoever_reads_gets_the_value(name: str, source: Kept, shard: OffloadedShard) -> None:
    assert torch.equal(READS[name](shard), READS[name](source.value))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda t: t.add_(1),
    "zero_": lambda t: t.zero_(),
    "mul_ on data": lambda t: t.data.mul_(3),
    "copy_": lambda t: t.copy_(torch.full(SHAPE, 4.0)),
    "copy_ of a row": lambda t: t.copy_(torch.arange(3.0)),
    "out": lambda t: torch.add(torch.ones(SHAPE), 1, out=t),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_in_place_goes_to_the_source(
    name: str, source: Kept, shard: OffloadedShard
) -> None:
    expected = source.value.clone()
    WRITES[name](expected)
    WRITES[name](shard)
    assert torch.equal(source.value, expected)
    assert torch.equal(shard.clone(), expected)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "a row": lambda t: t[0],
    "transposed": lambda t: t.t(),
    "flat": lambda t: t.view(-1),
    "narrowed": lambda t: t.narrow(0, 0, 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_views_are_refused_by_name(name: str, source: Kept, shard: OffloadedShard) -> None:
    before = source.value.clone()
    with pytest.raises(OffloadError, match=r"net\.weight is offloaded.*gathered_parameters"):
        REFUSED[name](shard)
    assert torch.equal(source.value, before)


@pytest.mark.parametrize("escape", ["tolist", "numpy"])
def test_ways_around_torch_do_not_show_the_one_element(escape: str, shard: OffloadedShard) -> None:
    with pytest.raises(RuntimeError, match="tensor subclasses"):
        getattr(shard, escape)()


def test_shapes_alone_are_not_read(source: Kept, shard: OffloadedShard) -> None:
    made = torch.zeros_like(shard)
    assert made.is_contiguous()
    assert torch.equal(made, torch.zeros(SHAPE))
    assert shard.new_empty(4).shape == (4,)
    assert source.num_reads == 0


def test_copies_and_files_hold_the_value(source: Kept, shard: OffloadedShard) -> None:
    assert torch.equal(copy.deepcopy(shard), source.value)
    assert torch.equal(copy.deepcopy(Parameter(shard)).detach(), source.value)
    file = io.BytesIO()
    torch.save({"weight": shard}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], source.value)


def test_writing_goes_to_the_source_and_checks_the_shape(
    source: Kept, shard: OffloadedShard
) -> None:
    shard.write(torch.full(SHAPE, 2.0))
    assert torch.equal(source.value, torch.full(SHAPE, 2.0))
    with pytest.raises(OffloadError, match=r"net\.weight.*\(5, 3\).*\(3, 5\)"):
        shard.write(torch.zeros(3, 5))


def test_a_shard_of_no_rows_is_a_shard(source: Kept) -> None:
    empty = OffloadedShard.of(Kept(torch.zeros(0, 3)), (0, 3), torch.float32, torch.device("cpu"))
    assert empty.clone().shape == (0, 3)
    assert empty.untyped_storage().data_ptr() > 0  # by which FSDP2 knows it again
