"""Blocks that have no values of their own run with those of the first of their kind."""

import torch
from torch import Tensor, nn

from boltmesh.strategies.deferred_initialization.deferred import deferred_init
from boltmesh.strategies.deferred_initialization.materialize import materialize
from boltmesh.strategies.tensor.skip_blocks import blocks_passed, parameters_lent


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.mix = nn.LSTM(6, 6, batch_first=True)  # has a list of its parameters beside
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.shifts = [torch.full((6,), 3.0)]
        self.bias = nn.Parameter(torch.randn(6))
        self.biases = [self.bias]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mix(x)[0] * self.scale + self.shifts[0] + self.biases[0]
        return y + self.number


def test_a_block_without_values_borrows_them_and_keeps_its_own_settings() -> None:
    with deferred_init(min_bytes=0):
        blocks = nn.ModuleList(Block(number) for number in range(3))
    named = {str(number): each for number, each in enumerate(blocks)}
    first, last = named["0"], named["2"]
    assert isinstance(first, Block)
    assert isinstance(last, Block)
    materialize(first)
    own = dict(last.named_parameters())
    others = dict(first.named_parameters())
    x = torch.randn(2, 4, 6)
    with parameters_lent(named, {"1": "0", "2": "0"}):
        assert [name for name, _ in blocks.named_parameters()] == [
            f"0.{name}" for name, _ in first.named_parameters()
        ]
        assert torch.equal(last(x), first(x) + 2)
        last(x).sum().backward()
    assert first.mix.weight_hh_l0.grad is not None
    for block, before in ((last, own), (first, others)):
        assert all(each is before[name] for name, each in block.named_parameters())
        assert block.mix._flat_weights[0] is block.mix.weight_ih_l0
        assert block.biases[0] is block.bias
    assert all(each.is_meta for each in own.values())
    materialize(last)
    assert not torch.equal(last(x), first(x) + 2)


def test_code_behind_a_block_that_is_passed_by_may_write_in_place() -> None:
    blocks = {str(number): nn.Linear(6, 6) for number in range(2)}
    x = torch.relu_(blocks["0"](torch.randn(2, 6)))
    with blocks_passed(blocks, {"1": "0"}):
        blocks["0"](x)
        torch.relu_(blocks["1"](x)).sum().backward()
    assert blocks["0"].weight.grad is not None
