"""Our side: ``ZeROStrategy`` under Lightning's Trainer, as a user runs it."""

import logging
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from boltmesh.strategies.data_parallel.zero import ZeroAxis
from boltmesh.strategies.zero import ZeROStrategy
from tests.benchmarks.peers.network import build_batches, build_network, loss_of
from tests.benchmarks.peers.problem import Problem
from tests.benchmarks.peers.turns import Turns


class Module(LightningModule):
    """The network of all engines."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self.network = build_network(problem.width, problem.depth)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return loss_of(self.network(inputs), targets, scale=self.problem.loss_scale)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.parameters(), lr=self.problem.lr, weight_decay=self.problem.weight_decay
        )


class Batches(IterableDataset[Any]):
    """The same few, for ever."""

    def __init__(self, problem: Problem) -> None:
        self.batches = build_batches(problem.width, problem.rows)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.batches


class TakeTurns(Callback):
    """Lets the Trainer run when it is our turn."""

    reads_gradients = False  # so that gradients may be taken away while backward makes them

    def __init__(self, connection: Connection, strategy: ZeROStrategy) -> None:
        self._strategy = strategy
        self._turns = Turns(connection, self._drain)
        self._norm = 0.0

    def _drain(self) -> None:
        axis = self._strategy.data_axis
        axis.synchronize()
        assert isinstance(axis, ZeroAxis)
        assert axis._offload is not None
        for stores in axis._offload.kept.stores:
            for store in stores.states.values():
                store.flush()  # also what is on its way to the disk

    def on_train_start(self, *args: Any) -> None:
        self._turns.begin_step()

    def on_after_backward(self, *args: Any) -> None:
        self._turns.end_backward()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        norm = self._strategy.gradient_norm(optimizer)
        self._norm = float("nan") if norm is None else norm

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        self._turns.end_step(float(outputs["loss"]), self._norm)
        trainer.should_stop = not self._turns.begin_step()


def silence() -> None:
    """Drop Lightning's advice and greetings, which say nothing about a benchmark."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def train(connection: Connection, problem: Problem) -> None:
    """Train in turns, see ``Turns``."""
    silence()
    strategy = ZeROStrategy(
        stage=3,
        offload_optimizer=problem.place,
        offload_path=problem.folder if problem.place == "nvme" else None,
        telemetry=False,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed" if problem.is_bf16 else "32-true",
        gradient_clip_val=problem.max_norm,
        max_epochs=1,
        callbacks=[TakeTurns(connection, strategy)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(problem), DataLoader(Batches(problem), batch_size=None))
