"""A causal language model of Hugging Face's that is trained as scripts do it."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from tests.support.causal_lms import build


class CausalTraining(LightningModule):
    """Hands tokens to the model and takes its loss.

    Args:
        kind: As ``causal_lms.build`` knows it.
        optimizer: ``"sgd"`` or ``"adamw"``.
    """

    def __init__(self, kind: str = "llama", *, optimizer: str = "sgd") -> None:
        super().__init__()
        self.net = build(kind)
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[0], labels=batch[0]).loss
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(input_ids=batch[0], labels=batch[0]).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)
