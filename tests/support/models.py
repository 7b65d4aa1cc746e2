"""Small LightningModules that together use what users use: each written as a user would."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 6


def regression_data(count: int, batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    """``count`` samples that a line fits well enough for the loss to fall."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, FEATURES, generator=generator)
    noise = 0.1 * torch.randn(count, 1, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True).sin() + noise
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size, shuffle=shuffle)


class Regression(LightningModule):
    """A multilayer perceptron with a schedule, logging on step and epoch, and predictions."""

    def __init__(
        self,
        *,
        optimizer: str = "adamw",
        width: int = 11,
        dropout: float = 0.0,
        leaves_out_on_odd_steps: bool = False,
        has_frozen_layer: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer_name = optimizer
        self.lr = 0.01
        self.leaves_out_on_odd_steps = leaves_out_on_odd_steps
        self.net = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1),
        )
        self.side = nn.Linear(FEATURES, 1)
        if has_frozen_layer:
            self.net[3].requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def loss(self, batch: Any, *, uses_side: bool = True) -> Tensor:
        inputs, targets = batch
        outputs = self(inputs)
        if uses_side:
            outputs = outputs + 0.1 * self.side(inputs)
        return functional.mse_loss(outputs, targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        uses_side = not (self.leaves_out_on_odd_steps and self.global_step % 2)
        loss = self.loss(batch, uses_side=uses_side)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_synced", loss, on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("val_local", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        optimizer = torch.optim.AdamW(parameters, lr=self.lr)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class TwoOptimizers(LightningModule):
    """Manual optimisation in the manner of a GAN: two networks, two optimizers, two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(FEATURES, FEATURES)
        self.critic = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        first, second = self.optimizers()  # type: ignore[attr-defined]
        self.toggle_optimizer(first)
        generated = self.critic(self.generator(inputs))
        generator_loss = functional.mse_loss(generated, targets)
        self.manual_backward(generator_loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        judged = self.critic(self.generator(inputs).detach())
        critic_loss = (judged - targets).abs().mean()
        self.manual_backward(critic_loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.log_dict({"generator": generator_loss, "critic": critic_loss}, sync_dist=True)
        return generator_loss.detach()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        generated = self.critic(self.generator(batch[0]))
        self.log("val_loss", functional.mse_loss(generated, batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.05),
        ]


class Autoencoder(LightningModule):
    """A variational autoencoder whose layers are called by its steps: it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(12, 4), nn.Linear(12, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, FEATURES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, _ = batch
        hidden = self.encoder(inputs)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        latent = mean + torch.exp(0.5 * log_variance) * torch.linspace(-1, 1, 4)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).mean()
        loss = functional.mse_loss(self.decoder(latent), inputs) + 0.1 * divergence
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Tagger(LightningModule):
    """An LSTM over texts of different lengths, packed behind an embedding."""

    def __init__(self, vocabulary: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, vocabulary))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        lengths = 1 + tokens[:, 0] % tokens.shape[1]
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        padded, _ = pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=tokens.shape[1]
        )
        loss = functional.cross_entropy(self.head(padded).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)
