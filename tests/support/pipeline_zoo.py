"""Models of many families, small and with random weights, and batches for each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpt import GPT
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.support.hugging_face import WORDS, HuggingFace
from tests.support.skips import Skips

RATE = 0.05


class WrittenGPT(GPT):
    """The GPT of the examples."""

    def __init__(self) -> None:
        super().__init__(vocab_size=WORDS, block_size=8, n_layer=6, n_head=2, n_embd=16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch["input_ids"], batch["labels"]), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)


class Trained(HuggingFace):
    """One of Hugging Face, with its own loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which a convolution fits to where sizes change."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(into, out, 3, stride, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, out)
        self.second = nn.Conv2d(out, out, 3, padding=1)
        self.fit = None if into == out and stride == 1 else nn.Conv2d(into, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.fit is None else self.fit(x)
        return F.relu(shortcut + self.second(F.relu(self.norm(self.first(x)))))


class Images(LightningModule):
    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)


class ResNet(Images):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        sizes = [(8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 16, 1), (16, 16, 2)]
        self.layers = nn.Sequential(*(Residual(*each) for each in sizes))
        self.head = nn.Linear(16, 3)

    def loss(self, batch: Any) -> Tensor:
        x = self.layers(self.stem(batch["pixel_values"]))
        return F.cross_entropy(self.head(x.mean((2, 3))), batch["labels"])


class Level(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(2, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(x)))


class UNet(Skips, Images):
    """Skips from every level down to the same level up, over the boundaries of stages."""

    def __init__(self) -> None:
        super().__init__(3, 8, Level)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.through(batch["pixel_values"]), batch["pixel_values"])


ZOO: dict[str, Callable[[], LightningModule]] = {
    "GPT, by hand": WrittenGPT,
    "Llama": partial(Trained, "llama"),
    "GPT-2": partial(Trained, "gpt2"),
    "GPT-2, tied": partial(Trained, "gpt2_tied"),
    "BERT": partial(Trained, "bert"),
    "T5": partial(Trained, "t5"),
    "ViT": partial(Trained, "vit"),
    "ResNet-like": ResNet,
    "U-Net": UNet,
}
OF_IMAGES = {"ViT", "ResNet-like", "U-Net"}


class _Batches(Dataset[dict[str, Tensor]]):
    def __init__(self, made: list[dict[str, Tensor]]) -> None:
        self.made = made

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.made[index]


def zoo_data(name: str, rows: int = 8, count: int = 5) -> DataLoader[Any]:
    """Batches: of texts of changing lengths with padding, which counts for nothing, or of images.

    The last one has a row less.
    """
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        here = rows - (number == count - 1)
        if name in OF_IMAGES:
            images = torch.randn(here, 3, 8, 8, generator=generator)
            labels = torch.randint(0, 3, (here,), generator=generator)
            made.append({"pixel_values": images, "labels": labels})
            continue
        length = (8, 8, 5)[number % 3]
        tokens = torch.randint(1, WORDS, (here, length), generator=generator)
        lengths = torch.randint(2, length + 1, (here, 1), generator=generator)
        mask = (torch.arange(length) < lengths).long()
        labels = tokens.masked_fill(mask == 0, -100)
        made.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
        if name == "GPT, by hand":
            del made[-1]["attention_mask"]
    return DataLoader(_Batches(made), batch_size=None)
