"""Blocks that run again in the backward pass give the same numbers and keep less."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from boltmesh.errors import ConfigError
from boltmesh.strategies import activation_checkpointing
from boltmesh.strategies.activation_checkpointing import ActivationCheckpointing
from boltmesh.strategies.ddp import DDPStrategy
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy

WIDTH, ROWS = 16, 12
KINDS = ["full", "selective"]


class Block(nn.Module):
    """Dropout, batch norm, and an argument that torch's checkpoint has as well."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor, *, debug: bool) -> Tensor:
        assert debug
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, debug=True)
        return x


@contextmanager
def kept_bytes(left_out: set[int]) -> Iterator[list[int]]:
    """What autograd is given to keep, each storage once."""
    found: dict[int, int] = {}
    total = [0]
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in left_out:
            alive.append(tensor)
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda each: each):
        yield total
    total[0] = sum(found.values())


def train(kind: Any) -> tuple[dict[str, Tensor], int, int]:
    """Gradients, buffers and random state after two steps; bytes kept by hooks; operations."""
    torch.manual_seed(3)
    net = Net()
    names = list(net.state_dict())
    recomputation = ActivationCheckpointing(kind)
    recomputation.put_on(net)
    assert list(net.state_dict()) == names
    data = torch.randn(2, ROWS, WIDTH)
    counter = FlopCounterMode(display=False)
    left_out = {each.untyped_storage().data_ptr() for each in net.parameters()}
    with counter:
        for x in data:
            with kept_bytes(left_out) as kept:
                loss = net(x).square().mean()
            loss.backward()
    recomputation.take_off()
    assert not any("forward" in vars(each) for each in net.modules())
    found = {name: each.grad for name, each in net.named_parameters() if each.grad is not None}
    found |= dict(net.named_buffers())
    found["random state"] = torch.get_rng_state()
    return found, kept[0], counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_equal_to_the_bit(kind: Any) -> None:
    expected, _, _ = train(None)
    found, _, _ = train(kind)
    assert found.keys() == expected.keys()
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []


def test_blocks_keep_their_inputs_and_run_again() -> None:
    (_, all_kept, once), (_, full, again), (_, _, selective) = map(train, (None, *KINDS))
    # Both batches, what the three blocks get, and what is squared at the end.
    assert full == (2 + 3 + 1) * ROWS * WIDTH * 4
    assert full < 0.3 * all_kept
    # Products of three blocks once more, of the third of them only as far as anything is kept.
    products = 3 * 2 * 2 * ROWS * 3 * WIDTH * WIDTH * 2
    assert once < again <= once + products
    assert selective == once


def test_a_share_of_the_blocks_runs_again_and_the_others_keep_all() -> None:
    (expected, all_kept, _), (found, some, _), (_, one, _) = map(
        train, (None, {"full": 0.6}, {"full": 0.1})
    )
    _, full, _ = train("full")
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []
    # Two of three blocks, and one.
    assert all_kept - one == (all_kept - full) / 3
    assert all_kept - some == 2 * (all_kept - full) / 3


@pytest.mark.parametrize(
    "kind", [{"full": 0}, {"full": 1.5}, {"full": True}, {}, {"full": 0.5, "selective": 0.5}]
)
def test_a_share_that_is_none_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"Write \{'full': 0.5\} for half of the blocks"):
        ActivationCheckpointing(kind)


def test_torch_is_given_the_tensors_that_a_block_gets_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It restores the generators of their devices alone, or dropout draws another mask again."""
    given: list[Any] = []

    def record(call: Any, *args: Any, **kwargs: Any) -> Any:
        given.extend(tree_leaves(args))
        return checkpoint(call, *args, **kwargs)

    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

        def forward(self, *, inputs: dict[str, Tensor]) -> Tensor:
            return self.drop(self.layer(inputs["hidden"]))

    monkeypatch.setattr(activation_checkpointing, "checkpoint", record)
    net = nn.ModuleList(ByName() for _ in range(2))
    ActivationCheckpointing("full").put_on(net)
    x = torch.randn(ROWS, WIDTH)
    net[0](inputs={"hidden": x}).sum().backward()
    assert any(each is x for each in given)


def test_what_runs_without_gradients_runs_once() -> None:
    net = Net().eval()
    calls: list[int] = []
    recomputation = ActivationCheckpointing("full")
    recomputation.put_on(net)
    net.blocks[0].norm.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        net(torch.randn(ROWS, WIDTH))
    assert len(calls) == 1
    net(torch.randn(ROWS, WIDTH)).sum().backward()
    assert len(calls) == 3


def test_an_instance_keeps_a_forward_of_its_own() -> None:
    net = Net()
    calls: list[int] = []

    def own(x: Tensor, *, debug: bool) -> Tensor:
        calls.append(1)
        return type(net.blocks[1]).forward(net.blocks[1], x, debug=debug)

    net.blocks[1].forward = own
    recomputation = ActivationCheckpointing("full")
    recomputation.put_on(net)
    recomputation.put_on(net)  # a second time changes nothing
    assert len(recomputation.blocks) == 3
    net(torch.randn(ROWS, WIDTH)).sum().backward()
    assert len(calls) == 2
    recomputation.take_off()
    assert vars(net.blocks[1])["forward"] is own
    assert not recomputation.blocks


class Cache:
    """As those of transformers: keys by layer."""

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.keys.get(layer_idx, 0)


class Attending(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.inner, self.layer_idx = nn.Linear(WIDTH, WIDTH), layer_idx

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is not None:
            cache.keys[self.layer_idx] = cache.get_seq_length(self.layer_idx) + len(x)
        return self.inner(x).tanh()


def test_a_cache_is_not_filled_twice() -> None:
    blocks = nn.ModuleList(Attending(index) for index in range(2))
    recomputation = ActivationCheckpointing("full")
    recomputation.put_on(nn.Sequential(blocks))
    x, cache = torch.randn(ROWS, WIDTH), Cache()
    for block in blocks:
        x = block(x, cache=cache)
    x.sum().backward()
    assert not cache.keys
    with torch.no_grad():
        blocks[1](x, cache)
    assert cache.keys == {1: ROWS}
    blocks[0](x, cache)
    with pytest.raises(ConfigError, match="Attending gets a cache with keys of earlier tokens"):
        blocks[1](x, cache)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing=True .* 'full'.*'selective'"):
        DDPStrategy(activation_checkpointing=True)
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="Sequential repeats none"):
        ActivationCheckpointing("full").put_on(plain)
    for schedule in ("zero_bubble", "zbv", "dualpipev"):
        with pytest.raises(ConfigError, match=rf"schedule='{schedule}' .* halves"):
            PipelineParallelStrategy(schedule=schedule, activation_checkpointing="full")
