"""A model whose loss counts some tokens only, and that logs what people log while training."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.support.stack import LENGTH, VOCABULARY, Stack


def masked_data(count: int, batch_size: int) -> DataLoader[Any]:
    """Texts of which very different numbers of tokens count: all, one, or none of two rows."""
    generator = torch.Generator().manual_seed(4)
    starts = torch.randint(VOCABULARY, (count, 1), generator=generator)
    tokens = (starts * 3 ** torch.arange(LENGTH + 1)) % VOCABULARY
    targets = tokens[:, 1:].clone()
    rows = torch.arange(count)
    targets[rows % 8 < 2] = -100
    targets[rows % 8 == 3, 1:] = -100
    targets[rows % 5 == 4, :3] = -100
    return DataLoader(TensorDataset(tokens[:, :-1], targets), batch_size=batch_size)


class MaskedStack(Stack):
    """Divides by ``max(n, 1)``, has a penalty on weights, and logs values without a graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        logits = self(tokens)
        mask = targets != -100
        losses = functional.cross_entropy(
            logits.transpose(1, 2), targets.clamp(min=0), reduction="none"
        )
        loss = (losses * mask).sum() / mask.sum().clamp(min=1)
        hits = (logits.argmax(-1) == targets) & mask
        self.log("train_loss", loss)
        self.log("perplexity", loss.detach().exp())
        self.log_dict({"accuracy": hits.sum() / mask.sum(), "share": hits.float().mean()})
        self.log("hits", hits.sum())
        self.log("hits_of_python", float(hits.sum()))
        self.log("worst", (losses * mask).max())
        self.log("length", tokens.shape[1])
        self.log("root", losses.square().mean().sqrt())
        penalty = sum((each.square().sum() for each in [self.temperature]), torch.zeros(()))
        return {"loss": loss + 1e-2 * penalty, "hits": hits.sum().detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen: list[Tensor] = [*getattr(self, "seen", []), outputs["loss"].detach()]


class RoutedBlock(nn.Module):
    """Gives a scalar for the loss beside its output, as layers with routers do."""

    def __init__(self, block: nn.Module, *, is_balanced: bool) -> None:
        super().__init__()
        self.block = block
        self.is_balanced = is_balanced

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and a mean of squares; or a product of two means."""
        made = self.block(x)
        mean = made.square().mean()
        return made, mean * made.abs().mean() if self.is_balanced else mean


class RoutedStack(Stack):
    """Adds up what its blocks give for the loss."""

    def __init__(self, *, is_balanced: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.blocks = nn.ModuleList(
            RoutedBlock(each, is_balanced=is_balanced) for each in self.blocks
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        x, extra = self.embedding(tokens), torch.zeros(())
        for block in self.blocks:
            x, own = block(x)
            extra = extra + own
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * extra
        self.log("train_loss", loss)
        return loss

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))
