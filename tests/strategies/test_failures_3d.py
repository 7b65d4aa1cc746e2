"""One rank of a pipeline whose stages are shared fails or hangs: all end soon, and say where."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer, seed_everything

from boltmesh.strategies import Parallel3DStrategy
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import RankFailure, run_ranks

pytestmark = [pytest.mark.ranks]

RANKS = 4
VICTIM = 3
"""Of the second stage, and the second of those that share its layers."""
TIMEOUT_S = 20.0
WAIT_S = 60.0
SOON_S = WAIT_S / 2
"""What ranks may take that wait for nobody, however busy the machine is."""


class Stray(Callback):
    """Lets the second block of a rank raise in the third step, or hang until others have ended."""

    def __init__(self, how: str, folder: str) -> None:
        self.how = how
        self.folder = Path(folder)
        self.since_s = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            self.since_s = time.monotonic()
            if trainer.global_rank == VICTIM:
                pl_module.blocks[1].register_forward_pre_hook(self.stray)

    def stray(self, *_: Any) -> None:
        if self.how == "hangs":
            until = time.monotonic() + 300
            while len([*self.folder.iterdir()]) < RANKS - 1 and time.monotonic() < until:
                time.sleep(0.1)
            os._exit(3)
        raise ValueError("no more")


def train(rank: int, world_size: int, folder: str, how: str, sizes: Any) -> None:
    seed_everything(1, verbose=False)
    stray = Stray(how, folder)
    timeout_s = TIMEOUT_S if how == "hangs" else WAIT_S
    strategy = Parallel3DStrategy(**sizes, timeout_s=timeout_s)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, max_epochs=1, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[stray],
    )  # fmt: skip
    try:
        trainer.fit(TinyGPT(), text_data(32, 8))
    except Exception as error:
        took_s = time.monotonic() - stray.since_s
        Path(folder, str(rank)).write_text(f"{took_s} {error}")
        raise


STAGES = {"pipeline": 2, "tensor": 2, "microbatches": 2}


def told(folder: Path, how: str, sizes: dict[str, int] = STAGES) -> dict[int, tuple[float, str]]:
    """By rank how long it took to end, and with which words."""
    told = folder / "told"  # beside what else tests keep there
    told.mkdir()
    grace_s = TIMEOUT_S if how == "hangs" else SOON_S
    with pytest.raises(RankFailure):
        run_ranks(train, RANKS, str(told), how, sizes, grace_s=grace_s)
    found = {}
    for path in told.iterdir():
        seconds, text = path.read_text().split(" ", 1)
        found[int(path.name)] = float(seconds), text
    return found


@pytest.mark.full
def test_an_error_of_one_rank_that_shares_a_stage_ends_all_at_once(tmp_path: Path) -> None:
    found = told(tmp_path, "raises")
    assert found.keys() == set(range(RANKS))
    assert max(seconds for seconds, _ in found.values()) < SOON_S
    where = "Stage 1 on rank 3 failed in the forward pass of microbatch 0, in 'blocks.1' (Block)"
    for _, text in found.values():
        assert f"{where}: ValueError: no more" in text


@pytest.mark.full
@pytest.mark.parametrize("sizes", [STAGES, {"context": 2, "tensor": 2}], ids=str)
def test_one_rank_that_shares_layers_and_hangs_is_named_within_one_timeout(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    found = told(tmp_path, "hangs", sizes)
    assert found.keys() == set(range(RANKS)) - {VICTIM}
    # One after the other they would wait twice as long.
    assert max(seconds for seconds, _ in found.values()) < 2 * TIMEOUT_S
    for _, text in found.values():
        assert "rank 3" in text
