"""Models that keep more than parameters: running statistics, counters, extra state."""

from collections import deque
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CLASSES, WIDTH = 5, 6


def image_data(count: int, batch_size: int) -> DataLoader[Any]:
    """``count`` small images, whose class shows in their first row."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(count, 1, 6, 6, generator=generator)
    return DataLoader(
        TensorDataset(images, images[:, 0, 0, :CLASSES].argmax(-1)), batch_size=batch_size
    )


def vector_data(count: int, batch_size: int) -> DataLoader[Any]:
    """``count`` vectors of the width, with a class each."""
    generator = torch.Generator().manual_seed(5)
    vectors = torch.randn(count, WIDTH, generator=generator)
    return DataLoader(
        TensorDataset(vectors, vectors[:, :CLASSES].argmax(-1)), batch_size=batch_size
    )


class Residual(nn.Module):
    """Two convolutions with batch norm around a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm, self.after = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm(self.first(x)))
        return functional.relu(x + self.after(self.second(inner)))


class Images(LightningModule):
    """A small residual network, with a batch norm of vectors before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH))
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean((-1, -2))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Counting(nn.Module):
    """A block that counts its calls and keeps that in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + functional.gelu(self.norm(self.linear(x)))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Stateful(LightningModule):
    """Writes into buffers between its layers, at its start and at its end."""

    written: Tensor
    replaced: Tensor
    running_loss: Tensor
    rows: Tensor
    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(4))
        self.last_norm = self.blocks[3].norm
        self.head = nn.Linear(WIDTH, CLASSES)
        self.again = self.head
        self.register_buffer("written", torch.zeros(WIDTH))
        self.register_buffer("replaced", torch.zeros(WIDTH))
        self.register_buffer("running_loss", torch.zeros(()))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("noise", torch.randn(WIDTH), persistent=False)
        self.batches = 0
        self.seen: list[int] = []
        self.recent: deque[int] = deque(maxlen=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        self.rows += len(x)
        self.batches += 1
        self.seen.append(len(x))
        self.recent.append(len(x))
        x = x + self.noise
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0:
                with torch.no_grad():
                    self.written.lerp_(x.mean(0), 0.1)
            if number == 1:
                self.replaced = 0.9 * self.replaced + 0.1 * x.detach().mean(0)
        loss = functional.cross_entropy(self.head(x), target)
        with torch.no_grad():
            self.running_loss.lerp_(loss, 0.1)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)
