"""Ranks that a notebook forks give the whole model back, though each of them has shards."""

from pathlib import Path

import pytest

from tests.support.forked_python import run_python

SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import torch
from lightning.pytorch import Trainer
from torch.nn import Parameter
from boltmesh.strategies import ZeROStrategy
from tests.support.stack import Stack, token_data

module = Stack()
before = module.head.weight.detach().clone()
strategy = ZeROStrategy(telemetry=False, start_method="fork")
trainer = Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_steps=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, token_data(16, 2))
assert type(module.head.weight) is Parameter and module.head.weight.shape == before.shape
assert bool((module.head.weight != before).all())
print("whole")
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_forked_ranks_give_whole_parameters_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_python(str(script))
    assert done.stdout.strip().endswith("whole"), done.stderr
