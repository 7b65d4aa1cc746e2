"""Whole parameters outside of the forward pass, read and written."""

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.offload.shard_tensor import GatheredSource, OffloadedShard
from boltmesh.strategies.parameter_access import gathered_parameters, register_units, shard_value
from boltmesh.strategies.torch_compat.tensors import local_tensor, set_local_tensor
from tests.support.ranks import run_ranks


class Source(GatheredSource):
    """A shard in a list, for what an engine would do."""

    def __init__(self, name: str, value: Tensor) -> None:
        self.name, self.value = name, value.clone()

    @override
    def read(self) -> Tensor:
        return self.value

    @override
    def write(self, value: Tensor) -> None:
        self.value.copy_(value)

    @override
    def fetch(self) -> Tensor:
        return self.value.view(-1)

    @override
    def release(self) -> None:
        pass


def build(world_size: int, kind: str) -> tuple[Any, dict[str, Tensor]]:
    """A model with tied weights and uneven rows, and its values."""
    torch.manual_seed(3)
    model: Any = nn.ModuleDict(
        {
            "embedding": nn.Embedding(7, 5),
            "blocks": nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)]),
            "head": nn.Linear(5, 7),
        }
    )
    model.head.weight = model.embedding.weight
    model.head.forward = lambda x: nn.functional.linear(x, model.head.weight, model.head.bias)
    expected = {
        name: each.detach().clone() for name, each in model.named_parameters(remove_duplicate=False)
    }
    if kind == "copies":
        shape = (2, world_size // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    if kind == "plain":
        return model, expected
    for each in model.blocks:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        fully_shard(each, mesh=mesh, mp_policy=policy)
    root: Any = nn.Module()
    root.model = model
    root.forward = lambda x: model.head(model.blocks[1](model.blocks[0](model.embedding(x))))
    fully_shard(root, mesh=mesh, reshard_after_forward=False)
    register_units([root])
    if kind == "offloaded":
        weight = model.blocks[0].weight
        source = Source("blocks.0.weight", local_tensor(weight))
        shard = OffloadedShard.of(source, source.value.shape, torch.float32, torch.device("cpu"))
        set_local_tensor(weight, shard)
    model.root = [root]  # hidden from modules()
    return model, expected


def shard_of(parameter: Any, value: Tensor) -> Tensor:
    mesh = parameter.device_mesh
    parts = value.chunk(mesh.size(mesh.ndim - 1))
    place = mesh.get_local_rank(mesh.ndim - 1)
    return parts[place] if place < len(parts) else value[:0]


def reads_and_writes(rank: int, world_size: int, kind: str) -> None:
    model, expected = build(world_size, kind)
    before = dict(model.named_parameters())
    with gathered_parameters(model) as whole:
        assert list(whole) == list(expected)
        for name, value in expected.items():
            assert torch.equal(whole[name], value), name
            assert not isinstance(whole[name], DTensor)
        assert model.head.weight is model.embedding.weight is whole["head.weight"]
        assert {name: p.shape for name, p in model.named_parameters()} == {
            name: expected[name].shape for name in before
        }
    assert all(model.get_parameter(name) is each for name, each in before.items())
    # Every rank writes something else: the first rank's values count.
    with gathered_parameters(model, ["blocks.*", "head.weight"], writes=True) as whole:
        assert set(whole) == {
            "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias", "head.weight"
        }  # fmt: skip
        for each in whole.values():
            each.data.mul_(rank + 2)
    for name, value in expected.items():
        factor = 2 if name in whole or name == "embedding.weight" else 1
        parameter = model.get_parameter(name)
        kept = shard_value(parameter)
        wanted = value * factor if kind == "plain" else shard_of(parameter, value * factor)
        assert torch.equal(kept, wanted), name
    if kind != "plain":
        with gathered_parameters(model.head) as whole:
            assert torch.equal(whole["weight"], 2 * expected["head.weight"])


@pytest.mark.sample("sharded-3")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("sharded", 1), ("sharded", 3), ("copies", 4), ("offloaded", 2), ("plain", 2)],
)
def test_shards_are_read_and_written_whole(kind: str, world_size: int) -> None:
    run_ranks(reads_and_writes, world_size, kind)


def while_gathered(rank: int, world_size: int) -> list[float]:
    """The root is left gathered by a forward pass; a block's copy is in bf16."""
    model, expected = build(world_size, "sharded")
    root = model.root[0]
    tokens = torch.arange(5)
    first = root(tokens).sum()
    assert not isinstance(model.head.weight, DTensor)
    with gathered_parameters(model.head, writes=True) as whole:
        assert torch.equal(whole["weight"], expected["head.weight"])
        whole["bias"].data.add_(1)
    assert not isinstance(model.head.weight, DTensor)  # as it was: in the middle of something
    second = root(tokens).sum()
    (first + second).backward()
    assert model.head.weight.grad is not None
    return [first.item(), second.item()]


@pytest.mark.full
@pytest.mark.ranks
def test_a_gathered_unit_is_seen_through_and_gathered_again() -> None:
    for first, second in run_ranks(while_gathered, 2):
        assert second == pytest.approx(first + 5 * 7)


def refusals(rank: int, world_size: int) -> list[str]:
    model, _ = build(world_size, "sharded")
    said = []

    def replace() -> None:
        whole["head.bias"].data = torch.ones(7)

    with pytest.raises(ConfigError) as refused, gathered_parameters(model, ["blocks.0.wight"]):
        pass
    said.append(str(refused.value))
    with pytest.raises(ConfigError) as refused, gathered_parameters(model) as whole:
        whole["head.bias"].detach().zero_()
    said.append(str(refused.value))
    with gathered_parameters(model) as whole:
        whole["head.bias"].data.norm()
    for write in (lambda: whole["head.bias"].data.add_(1), replace):
        with pytest.raises(ConfigError) as refused, gathered_parameters(model) as whole:
            write()
        said.append(str(refused.value))
    with suppress(KeyError), gathered_parameters(model, writes=True) as whole:
        whole["head.bias"].data.zero_()
        raise KeyError
    assert shard_value(model.head.bias).abs().max() > 0
    assert dist.get_world_size() == world_size
    return said


@pytest.mark.ranks
def test_what_cannot_be_meant_is_refused_and_an_error_writes_nothing() -> None:
    unknown, *all_changed = run_ranks(refusals, 2)[0]
    assert "'blocks.0.wight'" in unknown
    assert "Did you mean 'blocks.0.weight'?" in unknown
    assert len(all_changed) == 3
    for changed in all_changed:
        assert "'head.bias' was changed inside" in changed
        assert "writes=True" in changed


def test_a_model_without_ranks_is_whole_already() -> None:
    model = nn.Linear(3, 4)
    with gathered_parameters(model, "weight", writes=True) as whole:
        assert whole["weight"] is model.weight
        whole["weight"].data.zero_()
    assert model.weight.abs().max() == 0
