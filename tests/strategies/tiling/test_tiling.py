"""A layer in tiles computes what the whole layer computes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from boltmesh.errors import ConfigError
from boltmesh.strategies.offload.shard_tensor import GatheredSource, OffloadedShard
from boltmesh.strategies.tiling.apply import apply_tiling
from boltmesh.strategies.torch_compat.tensors import local_tensor, set_local_tensor
from tests.support.ranks import run_ranks

TILE = 100
"""Bytes: a few rows of the layers below."""


class Net(nn.Module):
    """An embedding with padding, Linears with and without bias, and a frozen one."""

    def __init__(self, *, is_tied: bool = False, rows: int = 13) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 6, padding_idx=2)
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 6)
        self.still = nn.Linear(6, 6)
        self.still.requires_grad_(False)
        self.head = nn.Linear(6, rows, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.still(self.down(torch.tanh(self.up(x))))
        return self.head(x)

    def loss(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens).float().flatten(0, 1), tokens.flatten())


def batches(rows: int) -> Tensor:
    return torch.randint(rows, (12, 3, 5), generator=torch.Generator().manual_seed(1))


def make(**options: Any) -> Net:
    torch.manual_seed(4)
    return Net(**options)


def train(
    net: nn.Module, loss: Any, data: list[list[Tensor]], dtype: torch.dtype | None
) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """A few steps of SGD; losses, the last gradients and the last logits."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    losses, gradients = [], {}
    for step in data:
        optimizer.zero_grad()
        total = 0.0
        for batch in step:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                value = loss(batch) / len(step)
            value.backward()
            total += value.item()
        losses.append(total)
        gradients = {
            name: whole(each.grad) for name, each in net.named_parameters() if each.requires_grad
        }
        optimizer.step()
    net.eval()
    with torch.no_grad():
        logits = net(data[0][0])
    return losses, gradients, logits


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def layout_mesh(world_size: int, has_copies: bool) -> DeviceMesh:
    if has_copies:
        names = ("replicate", "shard")
        return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names)
    return init_device_mesh("cpu", (world_size,))


def tiled_run(
    rank: int, world_size: int, options: Any, tile: int | None, dtype: Any, accumulate: int,
    has_copies: bool,
) -> Any:  # fmt: skip
    net, mesh = make(**options), layout_mesh(world_size, has_copies)
    names = list(dict(net.named_parameters()))
    tiled = [] if tile is None else apply_tiling(net, tile, mesh)
    fully_shard(net, mesh=mesh, ignored_params={each.parameter for each in tiled})
    assert list(dict(net.named_parameters())) == names
    assert all(isinstance(each, DTensor) for each in net.parameters())
    data = batches(net.embedding.num_embeddings).split(accumulate * world_size)
    mine = [[*step[rank::world_size]] for step in data]
    losses, gradients, logits = train(net, lambda batch: loss_of(net, batch), mine, dtype)
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    weights = {name: whole(each) for name, each in net.named_parameters()}
    return mean / world_size, gradients, logits, weights, sorted(each.name for each in tiled)


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(tokens).float().flatten(0, 1), tokens.flatten())


CASES: dict[str, dict[str, Any]] = {
    "1 rank": {"world_size": 1},
    "2 ranks": {"world_size": 2},
    "3 ranks, uneven": {"world_size": 3},
    "4 ranks, more than some shards have rows": {"world_size": 4, "options": {"rows": 5}},
    "even rows": {"world_size": 2, "options": {"rows": 12}},
    "tied": {"world_size": 3, "options": {"is_tied": True}},
    "copies": {"world_size": 4, "has_copies": True},
    "accumulation": {"world_size": 2, "accumulate": 3},
    "one row a tile": {"world_size": 2, "tile": 1},
}
EVERY = ["down.weight", "embedding.weight", "head.weight", "still.weight", "up.weight"]


@pytest.mark.sample("tied")
@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_tiles_equal_one_process(name: str) -> None:
    case: dict[str, Any] = {
        "options": {},
        "tile": TILE,
        "accumulate": 1,
        "has_copies": False,
        **CASES[name],
    }
    world_size, options = case["world_size"], case["options"]
    net = make(**options)
    steps = batches(net.embedding.num_embeddings).split(case["accumulate"] * world_size)
    expected, gradients, logits = train(net, net.loss, [[*step] for step in steps], None)
    assert expected[-1] < expected[0]
    results = run_ranks(
        tiled_run, world_size, options, case["tile"], None, case["accumulate"], case["has_copies"]
    )
    for rank, (losses, found, evaluated, weights, tiled) in enumerate(results):
        shared = {"head.weight"} if options.get("is_tied") else set()
        assert set(EVERY) - set(tiled) <= shared
        assert losses.tolist() == pytest.approx(expected, rel=1e-6)
        for key, value in gradients.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)
        for key, value in net.named_parameters():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6, msg=key)
        if rank == 0:
            torch.testing.assert_close(evaluated, logits, rtol=1e-5, atol=1e-5)
        if options.get("rows") != 5:
            assert found["embedding.weight"][2].abs().max() == 0 or options.get("is_tied")


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_tiles_equal_whole_layers(dtype: torch.dtype) -> None:
    arguments: Any = ({}, None, dtype, 2, False)
    plain = run_ranks(tiled_run, 2, *arguments)[0]
    tiled = run_ranks(tiled_run, 2, {}, TILE, dtype, 2, False)[0]
    assert tiled[4] == EVERY
    torch.testing.assert_close(tiled[0], plain[0], rtol=2e-3, atol=0.0)
    for key, value in plain[1].items():
        torch.testing.assert_close(tiled[1][key], value, rtol=2e-2, atol=2e-3, msg=key)
    assert tiled[2].dtype == plain[2].dtype


class Source(GatheredSource):
    """A shard in memory of its own, padded to the size of the largest."""

    def __init__(self, value: Tensor, rows: int) -> None:
        self.name, self.value = "a weight", value.clone()
        self.flat = torch.zeros(rows * value.shape[1])
        self.flat[: value.numel()] = value.view(-1)

    @override
    def read(self) -> Tensor:
        return self.value

    @override
    def write(self, value: Tensor) -> None:
        self.value.copy_(value)

    @override
    def fetch(self) -> Tensor:
        raise AssertionError("a tiled shard is never put on the device whole")

    @override
    def release(self) -> None:
        raise AssertionError("nothing was fetched whole")

    @override
    def fetch_part(self, start: int, stop: int) -> Tensor:
        assert stop - start <= TILE // 4
        return self.flat[start:stop].clone()


def offloaded(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (world_size,))
    found: list[Tensor] = []
    for is_offloaded in (False, True):
        net = make()
        for each in apply_tiling(net, TILE, mesh):
            if is_offloaded:
                source = Source(local_tensor(each.parameter.detach()), each.plan.shard_rows)
                shape = source.value.shape
                shard = OffloadedShard.of(source, shape, torch.float32, torch.device("cpu"))
                set_local_tensor(each.parameter, shard)
        tokens = batches(13)[rank]
        loss = net.loss(tokens)
        loss.backward()
        found += [loss.detach(), whole(net.up.weight.grad)]
    return tuple(found)  # type: ignore[return-value]


@pytest.mark.full
@pytest.mark.ranks
def test_offloaded_shards_are_read_in_slices() -> None:
    for loss, gradient, offloaded_loss, offloaded_gradient in run_ranks(offloaded, 2):
        assert torch.equal(loss, offloaded_loss)
        assert torch.equal(gradient, offloaded_gradient)


def refusals(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    sparse = nn.Sequential(nn.Embedding(30, 10, sparse=True))
    shared = nn.ModuleDict({"line": nn.Linear(10, 30), "other": nn.Bilinear(2, 2, 2)})
    shared.other.weight = shared.line.weight
    said = []
    for model in (sparse, shared):
        with pytest.raises(ConfigError) as refused:
            apply_tiling(model, 100, mesh, name="model")
        said.append(str(refused.value))
    attention = nn.MultiheadAttention(8, 2)
    assert apply_tiling(attention, 16, mesh) == []  # it reads its children's weights
    small = nn.Linear(4, 4)
    assert apply_tiling(small, small.weight.nbytes, mesh) == []
    return said


@pytest.mark.ranks
def test_what_cannot_run_in_tiles_is_refused_by_name() -> None:
    sparse, shared = run_ranks(refusals, 1)[0]
    assert "'model.0' is larger than tile_linear_bytes and has sparse=True" in sparse
    assert "'model.line.weight' is run in tiles and is also 'model.other.weight'" in shared


def encoder_run(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True).eval()
    inputs = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = layer(inputs)
        tiled = apply_tiling(layer, 512, init_device_mesh("cpu", (world_size,)))
        assert [each.name for each in tiled] == ["linear1.weight", "linear2.weight"]
        return expected, layer(inputs)


@pytest.mark.full
@pytest.mark.ranks
def test_torch_s_fused_encoder_layer_is_not_in_the_way() -> None:
    for expected, found in run_ranks(encoder_run, 2):
        torch.testing.assert_close(found, expected)


def hooked(rank: int, world_size: int) -> list[str]:
    """A checkpointed layer is run again as far as its activations go, so without its hook."""
    net = make()
    seen: list[str] = []
    net.up.register_forward_hook(lambda *_: seen.append("up"))
    apply_tiling(net, TILE, init_device_mesh("cpu", (world_size,)))
    x = torch.randn(4, 6, requires_grad=True)
    plain = net.up(x).sum()
    again = torch.utils.checkpoint.checkpoint(net.up, x, use_reentrant=False).sum()
    first = torch.autograd.grad(plain, [x, net.up.weight])
    second = torch.autograd.grad(again, [x, net.up.weight])
    assert torch.equal(first[0], second[0])
    assert torch.equal(whole(first[1]), whole(second[1]))
    return seen


@pytest.mark.full
@pytest.mark.ranks
def test_hooks_and_activation_checkpointing_work() -> None:
    assert run_ranks(hooked, 2) == [["up"] * 2] * 2


def look_up_strangers(rank: int, world_size: int) -> list[str]:
    """Indices before the first row, behind the last one, and where a shard has padding."""
    net = make()
    apply_tiling(net, TILE, init_device_mesh("cpu", (world_size,)))
    said = []
    for index in (-1, -13, 13, 14):
        with pytest.raises(IndexError) as caught:
            net.embedding(torch.tensor([[3, index]]))
        said.append(str(caught.value))
    return said


def test_an_index_of_no_row_is_an_error_as_it_is_of_a_whole_embedding() -> None:
    for said in run_ranks(look_up_strangers, 2):
        assert said == ["1 indices are none of the embedding's 13 rows"] * 4
