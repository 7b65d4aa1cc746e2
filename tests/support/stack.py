"""A small model of repeated blocks: what sharding by block, ties and parameter groups meet."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH = 13, 5
EPS = 1e-4
"""AdamW's default of 1e-8 makes updates of full size from gradients that are rounding alone."""


def token_data(count: int, batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    """``count`` short texts in which each token follows from the one before it."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(VOCABULARY, (count, 1), generator=generator)
    tokens = (starts * 3 ** torch.arange(LENGTH + 1)) % VOCABULARY
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)


class Block(nn.Module):
    """Rows of odd numbers, so that shards are uneven, and of 3 ranks and more some are empty."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stack(LightningModule):
    """Embedding, blocks, norm and head, trained by AdamW with two parameter groups if asked."""

    def __init__(
        self,
        *,
        depth: int = 3,
        width: int = 7,
        hidden: int = 11,
        optimizer: str = "adamw",
        ties: bool = False,
        freezes: bool = False,
        groups: bool = False,
        skips: bool = False,
        has_scalar: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.5)) if has_scalar else None
        nn.init.normal_(self.embedding.weight, std=0.5)
        if ties:
            self.head.weight = self.embedding.weight
        if freezes:
            self.blocks[1].requires_grad_(False)
            self.blocks[0].up.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if not (self.hparams["skips"] and number == 1 and self.global_step % 2):
                x = block(x)
        logits = self.head(self.norm(x))
        return logits if self.temperature is None else logits * self.temperature

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
        if self.hparams["optimizer"] == "adagrad":
            return torch.optim.Adagrad(trained, lr=0.05)
        if not self.hparams["groups"]:
            return torch.optim.AdamW(trained, lr=0.01, eps=EPS)
        matrices = [each for each in trained if each.dim() > 1]
        vectors = [each for each in trained if each.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}],
            lr=0.01,
            eps=EPS,
        )
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Built(LightningModule):
    """Builds its layers in ``configure_model``, large enough to be deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is None:
            with torch.device("cpu"):  # Lightning's own strategies would draw on a GPU
                self.layers = nn.Sequential(
                    nn.Embedding(VOCABULARY, 128),
                    *(Block(128, 128) for _ in range(3)),
                    nn.Linear(128, VOCABULARY),
                )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        return functional.cross_entropy(self.layers(tokens).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
