"""lightly: self-supervised learning, as the LightningModules of its examples do it."""

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from tests.zoo.entry import ROWS, Entry, normal

IMPORTS = ["lightly.loss", "lightly.models.utils"]


def batch(number: int) -> Any:
    return normal(number, ROWS, 3, 8, 8), normal(number + 90, ROWS, 3, 8, 8)


def backbone() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class Views(LightningModule):
    """Two views of each image, one encoder."""

    def __init__(self, loss: str, head: str, *sizes: int, rate: float = 0.01) -> None:
        super().__init__()
        self.rate = rate
        from lightly import loss as losses
        from lightly.models.modules import heads

        self.backbone = backbone()
        self.projection_head = getattr(heads, head)(*sizes)
        self.criterion = getattr(losses, loss)()

    def forward(self, x: Any) -> Any:
        return self.projection_head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = batch
        loss = self.criterion(self(first), self(second))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class BYOL(LightningModule):
    """Its target follows its encoder by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import BYOLPredictionHead
        from lightly.models.utils import deactivate_requires_grad

        self.backbone = backbone()
        self.projection_head = nn.Linear(12, 10)
        self.prediction_head = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 10))
        assert BYOLPredictionHead
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: Any) -> Any:
        return self.prediction_head(self.projection_head(self.backbone(x)))

    def forward_momentum(self, x: Any) -> Any:
        return self.projection_head_momentum(self.backbone_momentum(x)).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        from lightly.models.utils import update_momentum

        update_momentum(self.backbone, self.backbone_momentum, m=0.9)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.9)
        first, second = batch
        return 0.5 * (
            self.criterion(self(first), self.forward_momentum(second))
            + self.criterion(self(second), self.forward_momentum(first))
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SimSiam(LightningModule):
    """Two views through one encoder; no gradient reaches a view by its projection."""

    def __init__(self) -> None:
        super().__init__()
        from lightly.loss import NegativeCosineSimilarity

        self.backbone = backbone()
        self.projection_head = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 10))
        self.prediction_head = nn.Sequential(nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 10))
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: Any) -> Any:
        projected = self.projection_head(self.backbone(x))
        return projected.detach(), self.prediction_head(projected)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = batch
        (projected, predicted), (others, other_predicted) = self(first), self(second)
        return 0.5 * (
            self.criterion(projected, other_predicted) + self.criterion(others, predicted)
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class DINO(BYOL):
    """Teacher and student with centred softmax."""

    def __init__(self) -> None:
        super().__init__()
        from lightly.loss import DINOLoss

        self.criterion = DINOLoss(output_dim=10, warmup_teacher_temp_epochs=1)

    def forward(self, x: Any) -> Any:
        return self.projection_head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        from lightly.models.utils import update_momentum

        update_momentum(self.backbone, self.backbone_momentum, m=0.9)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.9)
        first, second = batch
        teacher = [self.forward_momentum(first), self.forward_momentum(second)]
        student = [self(first), self(second)]
        return self.criterion(teacher, student, epoch=self.current_epoch)


ENTRIES = [
    Entry(
        "lightly SimCLR",
        lambda: Views("NTXentLoss", "SimCLRProjectionHead", 12, 12, 10),
        batch,
        microbatches=1,
    ),
    Entry(
        "lightly BarlowTwins",
        lambda: Views("BarlowTwinsLoss", "BarlowTwinsProjectionHead", 12, 12, 10, rate=0.001),
        batch,
        microbatches=1,
    ),
    Entry("lightly SimSiam", SimSiam, batch),
    Entry("lightly BYOL", BYOL, batch, is_shared_batch=True),
    Entry("lightly DINO", DINO, batch, is_shared_batch=True, has_unused=True, microbatches=1),
]
