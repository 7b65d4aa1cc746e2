"""What only CUDA devices can show of the other strategies: shards, offload, stages, divided layers.

On one device each strategy is compared with a plain Trainer; on several ``boltmesh check`` compares
a recipe with one process, over nccl.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from boltmesh.strategies import (
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from boltmesh.strategies.parameter_access import gathered_parameters
from tests.support.models import Regression, regression_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]

STRATEGIES = {
    "zero1": lambda folder: ZeROStrategy(stage=1),
    "zero2": lambda folder: ZeROStrategy(stage=2),
    "zero3": lambda folder: ZeROStrategy(stage=3),
    "zero1_cpu": lambda folder: ZeROStrategy(stage=1, offload_optimizer="cpu"),
    "zero2_cpu": lambda folder: ZeROStrategy(stage=2, offload_optimizer="cpu"),
    "zero3_cpu": lambda folder: ZeROStrategy(
        stage=3, offload_optimizer="cpu", offload_parameters="cpu"
    ),
    "zero3_nvme": lambda folder: ZeROStrategy(
        stage=3, offload_optimizer="nvme", offload_parameters="nvme", offload_path=folder
    ),
    "pipeline": lambda folder: PipelineParallelStrategy(stages=1, microbatches=2),
    "tensor": lambda folder: TensorParallelStrategy(size=1),
    "3d": lambda folder: Parallel3DStrategy(zero_stage=1),
}


class Whole(Callback):
    """Keeps the parameters that training ends with, wherever they live."""

    parameters: dict[str, Tensor]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with gathered_parameters(pl_module) as whole:
            self.parameters = {name: each.detach().cpu().clone() for name, each in whole.items()}


def fit(strategy: Any, **arguments: Any) -> dict[str, Tensor]:
    """Train a small model and return its parameters, on the CPU."""
    seed_everything(4)
    whole = Whole()
    trainer = Trainer(
        accelerator="cuda", devices=1, strategy=strategy, max_steps=20, logger=False,
        callbacks=[whole],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **arguments,
    )  # fmt: skip
    trainer.fit(Regression(), regression_data(160, 4), regression_data(8, 4))
    return whole.parameters


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", STRATEGIES)
def test_on_one_device_a_strategy_equals_a_plain_trainer(
    name: str, arguments: Any, tmp_path: Any
) -> None:
    theirs = fit(SingleDeviceStrategy(torch.device("cuda", 0)), **arguments)
    strategy = STRATEGIES[name](tmp_path)
    ours = fit(strategy, **arguments)
    bounds = (2e-2, 2e-3) if "precision" in arguments else (1e-4, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=bounds[0], atol=bounds[1])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("recipe", "devices"),
    [
        ("ddp", 2),
        ("zero1", 2),
        ("zero2", 2),
        ("zero3", 2),
        ("zero3_cpu", 2),
        ("zero3_nvme", 2),
        ("pipeline_1f1b", 2),
        ("pipeline_zbv", 2),
        ("tensor", 2),
        ("threed", 8),
        ("threed_zero1_cpu", 8),
    ],
)
def test_on_several_devices_a_recipe_equals_one_process(
    recipe: str, devices: int, precision: str
) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices")
    overrides = ["accelerator=cuda", f"devices={devices}", f"precision={precision}"]
    done = subprocess.run(
        [sys.executable, "-m", "boltmesh", "check", recipe, *overrides],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
