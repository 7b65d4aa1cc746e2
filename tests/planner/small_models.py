"""Twelve small models of different kinds, as a config names them, and data for each.

Sizes are such that a step takes some tens of milliseconds on a core, and that none is a multiple
of another. Layers count rows alone, so several ranks compute the numbers of one process.
"""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10
PIXELS, LENGTH, WORDS, FEATURES = 16, 32, 512, 256
MANY_WORDS = 8192

KINDS = {
    "gpt": "tokens",
    "llama": "tokens",
    "wide_gpt": "tokens",
    "encoder": "tokens",
    "recurrent": "tokens",
    "wide_embedding": "tokens",
    "perceptron": "features",
    "deep_narrow": "features",
    "autoencoder": "features",
    "conv_net": "images",
    "vision_transformer": "images",
    "mixer": "images",
}
"""The models, and what each reads."""
RANKS = dict.fromkeys(KINDS, 2) | {"llama": 4, "perceptron": 4, "conv_net": 4, "gpt": 8}
"""On how many CPU ranks each is measured."""


class Attention(nn.Module):
    """Causal or not, with fewer heads of keys than of queries if wanted."""

    def __init__(self, width: int, heads: int, key_heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.key_heads, self.is_causal = heads, key_heads, is_causal
        kept = width // heads * key_heads
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, kept)
        self.v, self.out = nn.Linear(width, kept), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.is_causal, enable_gqa=self.key_heads < self.heads
        )
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two matrices with GELU, or three as SwiGLU."""

    def __init__(self, width: int, hidden: int, *, is_gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gate = nn.Linear(width, hidden) if is_gated else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(x)))
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A pre-norm block of a transformer."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        hidden: int,
        key_heads: int | None = None,
        is_gated: bool = False,
        is_causal: bool = True,
    ) -> None:
        super().__init__()
        norm = nn.RMSNorm if is_gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = Attention(width, heads, key_heads or heads, is_causal=is_causal)
        self.feed_forward = FeedForward(width, hidden, is_gated=is_gated)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Residual(nn.Module):
    """Adds what its layers compute."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Turned(nn.Module):
    """A layer over the positions in place of the features."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Mean(nn.Module):
    """The mean over the positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Patches(nn.Module):
    """An image as a sequence of patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2)


class Recurrent(nn.Module):
    """The outputs of a recurrent layer, without its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)[0]
        return found


def layers_of(name: str) -> list[nn.Module]:
    """Return the layers of one of ``KINDS``, from its data to logits."""

    def blocks(count: int, width: int, heads: int, **options: Any) -> list[nn.Module]:
        return [Block(width, heads, **options) for _ in range(count)]

    if name == "gpt":
        body = blocks(8, 96, 4, hidden=384)
        return [nn.Embedding(WORDS, 96), *body, nn.LayerNorm(96), nn.Linear(96, WORDS)]
    if name == "llama":
        body = blocks(4, 128, 8, hidden=352, key_heads=4, is_gated=True)
        return [nn.Embedding(WORDS, 128), *body, nn.RMSNorm(128), nn.Linear(128, WORDS)]
    if name == "wide_gpt":
        body = blocks(2, 256, 4, hidden=1024)
        return [nn.Embedding(WORDS, 256), *body, nn.LayerNorm(256), nn.Linear(256, WORDS)]
    if name == "encoder":
        body = blocks(3, 160, 8, hidden=640, is_causal=False)
        return [nn.Embedding(WORDS, 160), *body, nn.Linear(160, WORDS)]
    if name == "recurrent":
        return [nn.Embedding(WORDS, 96), Recurrent(96), Recurrent(96), nn.Linear(96, WORDS)]
    if name == "wide_embedding":
        return [nn.Embedding(MANY_WORDS, 64), *blocks(2, 64, 4, hidden=256), nn.Linear(64, WORDS)]
    if name == "perceptron":
        body = [Residual(nn.Linear(512, 512), nn.GELU()) for _ in range(6)]
        return [nn.Linear(FEATURES, 512), *body, nn.Linear(512, CLASSES)]
    if name == "deep_narrow":
        body = [Residual(nn.Linear(96, 96), nn.Tanh()) for _ in range(32)]
        return [nn.Linear(FEATURES, 96), *body, nn.Linear(96, CLASSES)]
    if name == "autoencoder":
        return [
            nn.Linear(FEATURES, 1536), nn.ReLU(), nn.Linear(1536, 128), nn.ReLU(),
            nn.Linear(128, 1536), nn.ReLU(), nn.Linear(1536, CLASSES),
        ]  # fmt: skip
    if name == "conv_net":
        convolved = [
            Residual(nn.Conv2d(48, 48, 3, padding=1), nn.GroupNorm(4, 48), nn.ReLU())
            for _ in range(4)
        ]
        return [
            nn.Conv2d(3, 48, 3, stride=2, padding=1), *convolved, nn.Flatten(),
            nn.Linear(48 * (PIXELS // 2) ** 2, CLASSES),
        ]  # fmt: skip
    patches = (PIXELS // 4) ** 2
    if name == "vision_transformer":
        body = blocks(4, 128, 4, hidden=512, is_causal=False)
        return [Patches(128), *body, nn.LayerNorm(128), Mean(), nn.Linear(128, CLASSES)]
    assert name == "mixer"
    mixed = [
        nn.Sequential(
            Residual(nn.LayerNorm(128), Turned(FeedForward(patches, 64, is_gated=False))),
            Residual(nn.LayerNorm(128), FeedForward(128, 512, is_gated=False)),
        )
        for _ in range(5)
    ]
    return [Patches(128), *mixed, Mean(), nn.Linear(128, CLASSES)]


class SmallModel(LightningModule):
    """One of ``KINDS``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(*layers_of(name))
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.layers(x)
        loss = functional.cross_entropy(logits.flatten(0, -2), y.flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class SmallData(LightningDataModule):
    """Random rows for one of ``KINDS``.

    Args:
        name: Of the model.
        batch_size: Rows of a batch of a rank.
        batches: Batches of a rank, whatever their size and the number of ranks.
    """

    def __init__(self, name: str, batch_size: int = 32, batches: int = 16) -> None:
        super().__init__()
        self.kind, self.batch_size, self.batches = KINDS[name], batch_size, batches
        self.words = MANY_WORDS if name == "wide_embedding" else WORDS

    def train_dataloader(self) -> DataLoader[Any]:
        ranks = 1 if self.trainer is None else self.trainer.world_size
        count = self.batch_size * self.batches * ranks
        generator = torch.Generator().manual_seed(11)
        if self.kind == "tokens":
            tokens = torch.randint(self.words, (count, LENGTH), generator=generator)
            data = TensorDataset(tokens, (tokens * 3 + 1) % WORDS)
        else:
            shape = (3, PIXELS, PIXELS) if self.kind == "images" else (FEATURES,)
            rows = torch.randn(count, *shape, generator=generator)
            classes = torch.randint(CLASSES, (count,), generator=generator)
            data = TensorDataset(rows, classes)
        return DataLoader(data, batch_size=self.batch_size)
