"""Layouts of several axes whose ranks are killed one after the other go on as if nothing was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from boltmesh.run_folder import newest_checkpoint
from boltmesh.strategies import Parallel3DStrategy, gathered_parameters
from tests.support.gpts import TinyGPT, text_data
from tests.support.killing import fatal
from tests.support.ranks import RankFailure, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

RANKS = 4
STEPS = 5
NOBODY = -1


class Gather(Callback):
    """Keeps the parameters that training ends with, whole."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with gathered_parameters(pl_module) as whole:
            self.found = {name: each.detach().clone() for name, each in whole.items()}


def train(
    world_size: int,
    sizes: dict[str, Any],
    *callbacks: Callback,
    folder: Path | None = None,
    ckpt_path: Path | None = None,
) -> dict[str, Tensor]:
    seed_everything(3, verbose=False)
    module, gather = TinyGPT(dropout=0.2), Gather()
    saver = [] if folder is None else [ModelCheckpoint(folder, "{step}", every_n_train_steps=1)]
    trainer = Trainer(
        accelerator="cpu", devices=world_size, max_steps=STEPS, logger=False,
        strategy=Parallel3DStrategy(microbatches=2, telemetry=False, **sizes),
        callbacks=[gather, *saver, *callbacks], enable_checkpointing=folder is not None,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, text_data(24, 4, shuffle=True), ckpt_path=ckpt_path)
    return gather.found


def go_on(
    rank: int, world_size: int, sizes: dict[str, Any], folder: Path, victim: int, where: str
) -> tuple[str | None, list[str], int]:
    """Go on from the newest checkpoint, until one rank is killed at some place.

    Returns:
        What was gone on from, the parameters that differ from those of a run that nobody has
        disturbed, and how many there are.
    """
    found = newest_checkpoint(folder.parent.parent)
    callbacks = fatal(where, 3 if where == "save" else 2) if rank == victim else []
    after = train(world_size, sizes, *callbacks, folder=folder, ckpt_path=found)
    straight = train(world_size, sizes)
    apart = [name for name, each in straight.items() if not torch.equal(each, after[name])]
    return None if found is None else found.name, apart, len(straight)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "kills"),
    [
        ({"data": 2, "pipeline": 2}, ((3, "step"), (0, "resume"), (2, "save"))),
        ({"pipeline": 2, "tensor": 2}, ((1, "step"), (2, "resume"), (3, "save"))),
    ],
    ids=["data x pipeline", "pipeline x tensor"],
)
def test_ranks_killed_in_a_step_a_resume_and_a_save_lose_no_step(
    tmp_path: Path, sizes: dict[str, Any], kills: tuple[tuple[int, str], ...]
) -> None:
    folder = tmp_path / "0" / "checkpoints"
    for victim, where in kills:
        with pytest.raises(RankFailure, match="died with exit code -9") as killed:
            run_ranks(go_on, RANKS, sizes, folder, victim, where)
        assert f"rank {victim}: died" in str(killed.value)
    told: list[Any] = run_ranks(go_on, RANKS, sizes, folder, NOBODY, "nowhere")
    for name, apart, count in told:
        # Killed in the step behind the second; in the save behind the fourth.
        assert (name, apart) == ("step=3.ckpt", [])
        assert count == len(list(TinyGPT().named_parameters()))
