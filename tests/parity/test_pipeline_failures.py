"""What fails in a pipeline ends all of its ranks in seconds, and says where it failed."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import seed_everything
from torch import Tensor
from typing_extensions import override

from boltmesh.errors import BoltMeshError
from boltmesh.strategies.torch_compat.tensors import is_fake
from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import run_ranks
from tests.support.scripts import script_of_two_ranks, wait_until_gone
from tests.support.stack import Block, Stack, token_data

pytestmark = pytest.mark.ranks

SECONDS = 30.0
"""However busy the machine is; the ranks of these tests wait a minute for each other."""


class Fails(Block):
    """Does what it should not from its ninth call on: in the third step's first microbatch."""

    def __init__(self, width: int, hidden: int, how: str) -> None:
        super().__init__(width, hidden)
        self.how = how
        self.calls = 0

    @override
    def forward(self, x: Tensor) -> Tensor:
        if is_fake(x):
            return super().forward(x)
        self.calls += 1
        if self.calls > 8 and self.how == "raise":
            raise ValueError("no more")
        if self.calls > 8 and self.how == "shape":
            return super().forward(x)[:, 1:]
        return super().forward(x)


class Failing(Stack):
    """Fails in a way and at a place."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(depth=6)
        self.rank, self.how = rank, how
        if how in ("raise", "shape"):
            number = {"raise": 5, "shape": 1}[how]
            self.blocks[number] = Fails(7, 11, how)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "step" and batch_idx == 2 and self.rank == 1:
            raise KeyError("no such thing")
        return super().training_step(batch, batch_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.how == "uncut" and self.rank == 1 and self.global_step == 2:
            return [batch[0], batch[1][:-1]]
        return batch


def fail(rank: int, world_size: int, how: str) -> tuple[str, float, bool]:
    seed_everything(1, verbose=False)
    module = Failing(rank, how)
    trainer = quiet_trainer(world_size, pipeline())
    start = time.monotonic()
    try:
        trainer.fit(module, token_data(64, 8))
    except BoltMeshError as error:
        seconds = time.monotonic() - start
        # What is left of the groups serves another run.
        trainer = quiet_trainer(world_size, pipeline())
        trainer.fit(Stack(depth=4), token_data(16, 8))
        return str(error), seconds, trainer.global_step == 2
    return "", 0.0, False


@pytest.mark.sample(
    "raise-forward pass of microbatch 0, in 'blocks.5' (Fails): ValueError: no more"
)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "raise",
            "forward pass of microbatch 0, in 'blocks.5' (Fails): ValueError: no more",
        ),
        (
            "shape",
            "(2, 4, 7), and the boundary from stage 0 to stage 1, in microbatch 0, awaits float32",
        ),
        ("step", "Stage 1 on rank 1 failed in the forward pass of microbatch 0"),
        ("uncut", "batch[0] has 8 rows and batch[1] has 7"),
    ],
)
def test_all_ranks_say_what_failed_and_can_run_again(how: str, said: str) -> None:
    told = run_ranks(fail, 2, how)
    for text, seconds, goes_on in told:
        assert said in text
        assert seconds < SECONDS
        assert goes_on
    if how == "uncut":
        assert "Rank 1, which has stage 1, could not begin the step: ConfigError" in told[0][0]


SCRIPT = """
import time
import boltmesh
import torch
from lightning.pytorch import Trainer
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.stack import Stack, token_data

class Slow(Stack):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            import os
            os.write(1, f"READY {self.global_rank} {os.getpid()}\\n".encode())
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

strategy = PipelineParallelStrategy(telemetry=False, microbatches=4)
trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=-1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False)
trainer.fit(Slow(depth=4), token_data(80, 8))
"""


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_within_a_step_takes_the_others_with_it(
    victim: int, tmp_path: Path
) -> None:
    with script_of_two_ranks(SCRIPT, tmp_path) as (process, pids):
        os.kill(pids[victim], signal.SIGKILL)
        assert process.wait(SECONDS) != 0
        assert wait_until_gone(pids[1], SECONDS)
