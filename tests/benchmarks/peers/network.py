"""The model that every engine trains, and its batches: the same weights and data for all."""

import torch
from torch import Tensor, nn

OUT_FEATURES = 16
NUM_BATCHES = 8


class Block(nn.Module):
    """Two linear layers around a residual. No norm: engines keep those in different precisions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


class Network(nn.Module):
    """A residual perceptron. Its parameters are nearly all in the blocks: 8 x width^2 in each."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, OUT_FEATURES)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build_network(width: int, depth: int) -> Network:
    """Weights of fp32 that bf16 can hold.

    DeepSpeed casts a model before it copies the fp32 masters out of it, so what bf16 cannot hold
    is gone there before the first step, and all weights begin in the middle of what rounds to them:
    a first step of a learning rate of 1e-4 moves them by up to 22 % more than it should.
    """
    torch.manual_seed(0)
    network = Network(width, depth)
    with torch.no_grad():
        for each in network.parameters():
            each.copy_(each.bfloat16())
    return network


def count_parameters(width: int, depth: int) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in Network(width, depth).parameters())


def build_batches(width: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Made before anything is timed, and used in turn."""
    source = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, width, generator=source),
            torch.randn(rows, OUT_FEATURES, generator=source),
        )
        for _ in range(NUM_BATCHES)
    ]


def loss_of(outputs: Tensor, targets: Tensor, *, scale: float) -> Tensor:
    """In fp32 whatever the network computed in. The scale decides how large gradients are."""
    return scale * (outputs.float() - targets).square().mean()
