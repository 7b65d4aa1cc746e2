"""Units become real one by one: alike on all ranks, and never more than one at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from boltmesh.errors import ConfigError
from boltmesh.strategies.deferred_initialization import recording
from boltmesh.strategies.deferred_initialization.deferred import deferred_init, is_deferred
from boltmesh.strategies.deferred_initialization.materialize import materialize, prepare_unit
from boltmesh.strategies.offload.host_memory import give_back_free_memory
from tests.benchmarks.peers.resident import resident_bytes
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def prepare(module: nn.Module, name: str = "") -> None:
    assert dist.group.WORLD is not None
    prepare_unit(module, device=CPU, group=dist.group.WORLD, name=name)


def test_a_module_on_meta_without_reset_parameters_is_refused_by_name() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    with pytest.raises(
        ConfigError, match=r"1 \(Scale\) was constructed on the meta device.*factor"
    ):
        materialize(model)


def test_reset_parameters_does_not_overwrite_values() -> None:
    with torch.device("meta"):
        layer = nn.Linear(3, 3)
    layer.bias = nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="'weight' on the meta device and values in its 'bias'"):
        materialize(layer)


def test_plain_meta_is_reset_children_first() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 4)
            self.own = nn.Parameter(torch.ones(2))

        def reset_parameters(self) -> None:
            nn.init.constant_(self.inner.weight, 7.0)
            nn.init.constant_(self.own, 5.0)

    with torch.device("meta"):
        outer, norm = Outer(), nn.BatchNorm1d(3)
    materialize(nn.ModuleList([outer, norm]))
    assert outer.inner.weight.unique().tolist() == [7.0]
    assert outer.own.unique().tolist() == [5.0]
    assert outer.inner.bias.abs().max() > 0
    assert norm.running_var.tolist() == [1.0, 1.0, 1.0]


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.state_dict().items()}


def made_on(rank: int, world_size: int, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(rank + 1)
    if kind == "real":
        module: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        nn.init.uniform_(module[1].running_mean)  # type: ignore[index]
    elif kind == "meta":
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    else:
        with deferred_init(min_bytes=1):
            module = GPT(n_layer=1, tie_weights=True)
    prepare(module)
    assert not any(each.is_meta for each in module.parameters())
    if kind == "deferred":
        assert module.head.weight is module.token_embedding.weight
    return values(module)


@pytest.mark.sample("deferred")
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["real", "meta", "deferred"])
def test_all_ranks_get_the_values_of_the_first(kind: str) -> None:
    first, *others = run_ranks(made_on, 3, kind)
    for other in others:
        assert other.keys() == first.keys()
        for name, value in first.items():
            assert torch.equal(other[name], value), name
    if kind == "deferred":
        torch.manual_seed(1)
        for name, value in GPT(n_layer=1, tie_weights=True).state_dict().items():
            assert torch.equal(first[name], value), name


def replays_of(rank: int, world_size: int) -> int:
    """How many tensors a rank draws."""
    with deferred_init(min_bytes=1):
        layer = nn.Linear(30, 40)
    fills = 0
    run = recording.Operation.run

    def counted(self: Any, content: Any) -> None:
        nonlocal fills
        fills += "uniform_" in str(self.function)
        run(self, content)

    recording.Operation.run = counted
    prepare(layer)
    return fills


@pytest.mark.full
@pytest.mark.ranks
def test_only_the_first_rank_replays() -> None:
    assert run_ranks(replays_of, 2) == [2, 0]


MIB = 1 << 20
NUM_BLOCKS, WIDTH = 12, 1024


class Block(nn.Module):
    """Two times 4 MiB of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.second.weight, std=0.02)


def peak_of_building(rank: int, world_size: int) -> tuple[float, float, float]:
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(nn.Linear(3, 3), mesh=mesh)
    prepare(nn.Linear(3, 3))
    with deferred_init(min_bytes=1):
        nn.Linear(512, 512)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with deferred_init():
        model = nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)])
    construction = resident_bytes("VmHWM") - before
    for name, block in model.named_children():
        assert is_deferred(block.first.weight)  # type: ignore[arg-type]
        prepare(block, name)
        fully_shard(block, mesh=mesh)
    peak = resident_bytes("VmHWM") - before
    give_back_free_memory()
    return construction, peak, resident_bytes("VmRSS") - before


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("world_size", [2, 4])
def test_building_takes_one_unit_beside_the_shards(world_size: int) -> None:
    unit = 2 * 4 * WIDTH * WIDTH
    shards = NUM_BLOCKS * unit / world_size
    slack = 6 * MIB  # code that is loaded on first use
    for construction, peak, kept in run_ranks(peak_of_building, world_size):
        assert construction <= unit / 2 + slack  # one tensor that is thrown away
        assert shards - slack <= kept <= shards + slack
        assert peak <= shards + unit + slack
