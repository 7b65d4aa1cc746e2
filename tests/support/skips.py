"""Models whose layers on the way down hand something to those on the way up."""

from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


class Skips(LightningModule):
    """Three levels down, one in the middle, three up; a subclass says what a level is.

    Args:
        channels: Of images.
        width: Of levels.
        level: Makes one, from how many channels it takes and gives.
    """

    def __init__(self, channels: int, width: int, level: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [level(channels, width), level(width, width), level(width, width)]
        )
        self.middle = level(width, width)
        self.up = nn.ModuleList([level(2 * width, width) for _ in range(3)])
        self.last = nn.Conv2d(width, channels, 1)

    def through(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.last(x)
