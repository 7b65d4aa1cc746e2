"""Which integers of modules are sizes that a rank's part divides, and which are not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.plan import TensorPlan
from boltmesh.strategies.tensor.planning import make_plan
from boltmesh.strategies.tensor.runtime.apply import owners_of, widths_of

WIDTH = 32


class Attention(nn.Module):
    def __init__(self, number: int, heads: int) -> None:
        super().__init__()
        self.number, self.heads = number, heads
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (each(x).view(rows, tokens, self.heads, -1).transpose(1, 2) for each in self.qkv)
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(rows, tokens, -1))


class Model(nn.Module):
    def __init__(self, heads: list[int], first: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(first + at, each) for at, each in enumerate(heads))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def plan_of(model: nn.Module, width: int) -> TensorPlan:
    def run(module: Any) -> Tensor:
        loss: Tensor = module(torch.randn(3, 5, width)).square().mean()
        return loss

    return make_plan(analyse(model, run, blocks=find_blocks(model)), 2)


def sizes_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """By block, the integers of its own that are divided."""
    found: dict[str, dict[str, int]] = {}
    for each in plan_of(model, WIDTH).attributes:
        if isinstance(model.get_submodule(each.module), Attention):
            found.setdefault(each.module, {})[each.name] = each.value
    return found


@pytest.mark.parametrize("first", [0, 1, 2, 4])
def test_a_number_that_differs_between_blocks_is_no_size(first: int) -> None:
    sizes = sizes_of(Model([4] * 6, first))
    assert sizes == {f"blocks.{at}": {"heads": 4} for at in range(6)}


def test_blocks_of_different_sizes_have_theirs() -> None:
    heads = [2, 4, 8, 4, 2]
    sizes = sizes_of(Model(heads, 0))
    assert sizes == {f"blocks.{at}": {"heads": each} for at, each in enumerate(heads)}


class Wide(nn.Module):
    """A linear layer of one's own, which views what it gives."""

    def __init__(self, number: int, ins: int, outs: int) -> None:
        super().__init__()
        self.number, self.outs = number, outs
        self.weight = nn.Parameter(torch.randn(ins, outs) / ins)

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(0, -2) @ self.weight).view(*x.shape[:-1], self.outs)


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = Wide(number, 4, 6), Wide(number, 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Stack(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*map(Block, range(8)))


def test_a_number_that_is_the_width_of_one_matrix_alone_is_none() -> None:
    model = Stack()
    plan = plan_of(model, 4)
    assert "6.up.weight" in plan.sharded
    assert widths_of(owners_of(model, plan)) == {Wide: {"outs"}}
