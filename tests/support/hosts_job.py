"""What ``test_two_hosts_3d.py`` trains, in one process and by torchrun on two hosts.

torchrun ... tests/support/hosts_job.py FOLDER
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from boltmesh.strategies import Parallel3DStrategy, gathered_parameters
from tests.support.gpts import TinyGPT, text_data

STEPS = 2
"""Of an epoch."""
SHARED = "step=2.ckpt"


class Watch(Callback):
    """Keeps each step's loss, and the whole parameters that an epoch ends with."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.parameters: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_synced"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with gathered_parameters(pl_module) as whole:
            self.parameters = {name: each.detach().clone() for name, each in whole.items()}


def batches(replica: int, replicas: int) -> DataLoader[Any]:
    """Batches of 8, or a replica's share of each."""
    shares = [list(range(8 * at, 8 * at + 8))[replica::replicas] for at in range(STEPS)]
    return DataLoader(text_data(8 * STEPS, 8).dataset, batch_sampler=shares)


def train(
    strategy: Any,
    *,
    epochs: int,
    save: Path | None = None,
    resume: Path | None = None,
    **ranks: Any,
) -> dict[str, Any]:
    """Return losses, parameters and what was said of the placement of ranks."""
    seed_everything(1, verbose=False)
    watch = Watch()
    ranks = {"devices": 2, "num_nodes": 2, **ranks}
    trainer = Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=epochs, callbacks=[watch], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **ranks,
    )  # fmt: skip
    replica, replicas = 0, 1
    if isinstance(strategy, Parallel3DStrategy):
        replica, replicas = strategy.coordinates["data"], strategy.layout.data
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(TinyGPT(), batches(replica, replicas), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    texts = [str(each.message) for each in caught]
    return {
        "losses": watch.losses,
        "parameters": watch.parameters,
        "said": [each for each in texts if each.startswith("Rank placement")],
    }


def train_on_two_hosts(folder: Path) -> None:
    """Train with the pipeline over the hosts, go on with replicas, then with layers over them."""
    saved = folder / SHARED
    found = {
        "pipeline": train(Parallel3DStrategy(pipeline=2, tensor=2), epochs=1, save=saved),
        "data": train(Parallel3DStrategy(data=2, tensor=2), epochs=2, resume=saved),
        # A Trainer that is told of one host is not asked what fits two.
        "tensor": train(Parallel3DStrategy(tensor=4), epochs=1, devices=4, num_nodes=1),
    }
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    train_on_two_hosts(Path(sys.argv[1]))
