"""A model whose loss counts some tokens only, and that logs what people log while training."""

from typing import Any

import torch
from torch import Tensor
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
