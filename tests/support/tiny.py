"""A model and data small enough that a run is over before its imports are."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies.checkpoint import directory, host_part

FEATURES = 6


class TinyModel(LightningModule):
    """A perceptron with dropout, so that a resumed run has random numbers to repeat.

    Args:
        width: Of the hidden layer.
        step_s: How long a step takes at least, so that a test can interfere.
        fail_at: Batch at which ``failing_rank`` raises.
        kill_at: Batch at which ``failing_rank`` is killed, as by the kernel.
        failing_rank: Which rank ``fail_at`` and ``kill_at`` mean.
    """

    def __init__(
        self,
        width: int = 5,
        learning_rate: float = 0.05,
        step_s: float = 0.0,
        fail_at: int | None = None,
        kill_at: int | None = None,
        failing_rank: int = 1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        options = self.hparams
        time.sleep(options["step_s"])
        if self.global_rank == options["failing_rank"]:
            if batch_idx == options["fail_at"]:
                raise ValueError("planted: this batch is bad")
            if batch_idx == options["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.mse_loss(self(x), y), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class TinySequence(TinyModel):
    """The same with each feature as a position of a sequence, for a context axis."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.layers = nn.Sequential(nn.Linear(1, width), nn.Tanh())
        self.attention = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.attention(self.layers(x[..., None])).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(queries, keys, values)).mean(1)


class Mixture(nn.Module):
    """Experts, of which each row goes through one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, 1) for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        made = torch.zeros_like(rows[:, :1])
        for number, expert in enumerate(self.experts):
            row = torch.where(chosen == number)[0]
            made = made.index_add(0, row, expert(rows[row]) * weights[row, None])
        return made


class TinyExperts(TinyModel):
    """The same with a mixture of experts behind its layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.layers = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), Mixture(width))


class TinyData(LightningDataModule):
    """A linear function with noise."""

    def __init__(self, samples: int = 96, batch_size: int = 4, workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.workers = batch_size, workers
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(samples, FEATURES, generator=generator)
        y = x.sum(1, keepdim=True) + 0.1 * torch.randn(samples, 1, generator=generator)
        self.part = TensorDataset(x, y)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            self.part, batch_size=self.batch_size, shuffle=True, num_workers=self.workers
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.part, batch_size=self.batch_size)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader


class SignalAt(Callback):
    """Sends a signal to one rank after an optimizer step, as a person or a scheduler would."""

    def __init__(self, batch: int, rank: int = 1, signum: int = signal.SIGINT) -> None:
        self.batch, self.rank, self.signum = batch, rank, signum
        self.seen = 0

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        self.seen += 1
        if self.seen == self.batch and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)


class KillOnce(Callback):
    """Kills one rank after each of these optimizer steps, when a start of the run first gets there.

    A file in the working directory says that it has been done.
    """

    def __init__(self, steps: list[int], rank: int = 1) -> None:
        self.steps, self.rank = steps, rank

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_rank == self.rank and trainer.global_step in self.steps:
            done = Path(f"killed-{trainer.global_step}")
            if not done.exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)


class KillInCopy(Callback):
    """Kills rank 0 before the copy in memory of this step is complete, when a run first gets there.

    A file in the working directory says that it has been done.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        done = Path("killed-in-copy")
        if trainer.global_rank or trainer.global_step != self.step or done.exists():
            return

        def kill(*args: object, **kwargs: object) -> None:
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        def complete(*args: Any, **kwargs: Any) -> None:
            vars(directory)["write_manifest"] = kill
            directory.complete_directory(*args, **kwargs)

        vars(host_part)["complete_directory"] = complete


class KillBeforeLog(Callback):
    """Kills rank 0 once the state after this step is saved, and before Lightning logs the step.

    When a run first gets there; a file in the working directory says that it has been done.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        done = Path("killed-before-log")
        if trainer.global_rank or trainer.global_step != self.step or done.exists():
            return

        def kill(*args: Any) -> None:
            vars(trainer.strategy)["memory_checkpoints"].wait()
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        vars(pl_module)["on_train_batch_end"] = kill  # called behind all callbacks
