"""Small GPTs as people write them by hand, for plans that divide them."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH = 24, 6

EPSILON = 1e-4
"""Of Adam: the gradients of key biases are zero in truth, and their rounding is not to be scaled up
to the size of a step."""


def text_data(count: int, batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    """``count`` short texts in which each token follows from the one before it."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(VOCABULARY, (count, 1), generator=generator)
    tokens = (starts * 5 ** torch.arange(LENGTH + 1) + torch.arange(LENGTH + 1)) % VOCABULARY
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


class Attention(nn.Module):
    """Causal attention with one projection for q, k and v, or with three."""

    def __init__(self, width: int, heads: int, *, is_fused: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.width, self.dropout = heads, width, dropout
        if is_fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=each != "k") for each in "qkv")
        self.is_fused = is_fused
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).split(self.width, dim=2) if self.is_fused else (
            self.q(x), self.k(x), self.v(x)
        )  # fmt: skip
        q, k, v = (
            each.view(batch, length, self.heads, self.width // self.heads).transpose(1, 2)
            for each in parts
        )
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, self.width))


class Adapted(nn.Module):
    """A frozen layer and a product of two thin ones beside it, as LoRA has them."""

    def __init__(self, layer: Any, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.b(self.a(x))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, width: int, heads: int, *, is_fused: bool, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, is_fused=is_fused, dropout=dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.first(x)))
        return x + self.drop(self.down(functional.gelu(self.up(self.second(x)))))


class TinyGPT(LightningModule):
    """Two blocks of four heads."""

    def __init__(
        self,
        *,
        depth: int = 2,
        width: int = 16,
        heads: int = 4,
        vocabulary: int = VOCABULARY,
        is_fused: bool = True,
        ties: bool = False,
        dropout: float = 0.0,
        optimizer: str = "adamw",
        groups: bool = False,
        freezes: bool = False,
        lora: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, is_fused=is_fused, dropout=dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if ties:
            self.head.weight = self.tokens.weight
        for name, each in self.named_parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.3 if "tokens" in name else 1 / math.sqrt(width))
        if freezes:
            self.tokens.requires_grad_(False)
            self.blocks[0].requires_grad_(False)

        if lora:
            self.requires_grad_(False)
            for block in self.blocks:
                block.up, block.down = Adapted(block.up, lora), Adapted(block.down, lora)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_synced", loss, on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        if self.hparams["optimizer"] == "sgd":
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        if not self.hparams["groups"]:
            return torch.optim.AdamW(trained, lr=0.01, eps=EPSILON)
        matrices = [each for each in trained if each.dim() > 1]
        vectors = [each for each in trained if each.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}],
            lr=0.01,
            eps=EPSILON,
        )
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
