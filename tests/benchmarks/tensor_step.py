"""A step on a tensor plan that found itself beside hand-written ``parallelize_module``.

    python tests/benchmarks/tensor_step.py [--ranks 2] [--rounds 8] [--steps 10] [--width 512]

Both train the same transformer on the same batch in the same processes, in turn, round after round:
``ColwiseParallel`` and ``RowwiseParallel`` written by hand for this model there, the automatic plan
of the unmodified model here; the head gives whole logits in both. Losses and gradients are compared
with one process first. A round's figure is its median step on the first rank; printed are the
medians and the median of the rounds' ratios.
"""

import argparse
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from boltmesh.strategies.blocks import find_blocks
from boltmesh.strategies.tensor.analysis.analyse import analyse
from boltmesh.strategies.tensor.choosing import make_plan
from boltmesh.strategies.tensor.execution.apply import apply_plan
from boltmesh.strategies.tensor.execution.group import TensorGroup
from tests.support.ranks import run_ranks

ROWS, TOKENS, WORDS, HEADS, LAYERS = 4, 128, 256, 8, 4


class Attention(nn.Module):
    """Causal attention that takes the number of its heads from what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.channels = width // HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.channels)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(width: int) -> Transformer:
    torch.manual_seed(0)
    return Transformer(width)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(WORDS, (ROWS, TOKENS)), torch.randint(WORDS, (ROWS, TOKENS))


def loss_of(model: nn.Module) -> Tensor:
    tokens, targets = batch()
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def ours(world_size: int, width: int) -> nn.Module:
    model = build(width)
    plan = make_plan(analyse(model, loss_of, blocks=find_blocks(model)), world_size)
    apply_plan(model, plan, TensorGroup(dist.group.WORLD, torch.device("cpu")))
    return model


def theirs(world_size: int, width: int) -> nn.Module:
    model = build(width)
    mesh = init_device_mesh("cpu", (world_size,))
    styles = {"q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel}
    plan = {f"attention.{name}": style() for name, style in styles.items()}
    plan |= {"attention.out": RowwiseParallel()}
    plan |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model
