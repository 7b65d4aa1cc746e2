"""A small LightningModule that every strategy takes, pipelines too."""

from typing import Any

import lightning.pytorch as lightning
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.models import FEATURES


class Blocks(lightning.LightningModule):
    """Blocks that a pipeline can be cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs, targets = batch
        for block in self.blocks:
            outputs = outputs + block(outputs).tanh()
        return functional.mse_loss(outputs.sum(1, keepdim=True), targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)
