"""A notebook's process, whose ranks are forks of it, has the trained weights afterwards."""

from pathlib import Path

import pytest

from tests.support.forked_python import run_python

SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import torch
from lightning.pytorch import Trainer, seed_everything
from boltmesh.strategies import Parallel3DStrategy
from tests.support.stack import Stack, token_data


def trained(strategy, devices):
    seed_everything(1, verbose=False)
    module = Stack(depth=2, width=8, hidden=12, optimizer="sgd")
    Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, token_data(16, 4))
    return module


ranks = trained(
    Parallel3DStrategy(
        telemetry=False, pipeline=2, tensor=2, microbatches=2, zero_stage=STAGE, start_method="fork"
    ),
    devices=4,
)
alone = trained("auto", devices=1)
torch.testing.assert_close(
    dict(ranks.named_parameters()), dict(alone.named_parameters()), rtol=1e-5, atol=1e-6
)
print("equal")
"""


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_forked_stages_of_divided_layers_give_whole_parameters_back(
    stage: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("STAGE", str(stage)))
    done = run_python(str(script))
    assert done.stdout.strip().endswith("equal"), done.stderr
