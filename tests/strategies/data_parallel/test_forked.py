"""Ranks that a notebook forks give the whole model back, though each of them has shards."""

import subprocess
import sys

import pytest

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
def test_forked_ranks_give_whole_parameters_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip().endswith("whole"), done.stderr
