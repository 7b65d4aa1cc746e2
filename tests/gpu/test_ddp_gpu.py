"""What only a CUDA device can show of the engine: nccl, mixed precision, spans by events."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy

from boltmesh.strategies import DDPStrategy
from boltmesh.telemetry.reader.reader import open_job
from tests.support.models import Regression, regression_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # Lightning steps schedulers also where the first step of fp16 is skipped.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]


class Notes(Callback):
    """Keeps what is gone after the fit."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.device = pl_module.device
        strategy = trainer.strategy
        if isinstance(strategy, DDPStrategy):
            self.backend = dist.get_backend(strategy.groups["data"])
            self.path = strategy.recorder.path


def fit(strategy: Any, **arguments: Any) -> tuple[Regression, Notes]:
    seed_everything(4)
    notes, module = Notes(), Regression()
    trainer = Trainer(
        accelerator="cuda", devices=1, strategy=strategy, max_steps=40, logger=False,
        callbacks=[notes], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, **arguments,
    )  # fmt: skip
    trainer.fit(module, regression_data(160, 4), regression_data(8, 4))
    return module, notes


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
        {"precision": "16-mixed", "gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_ddp_on_one_device_equals_one_process(arguments: Any) -> None:
    ours, notes = fit(DDPStrategy(), **arguments)
    assert notes.device.type == "cuda"
    assert notes.backend == "nccl"
    theirs, _ = fit(SingleDeviceStrategy(torch.device("cuda", 0)), **arguments)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_spans_come_from_events_and_cover_the_step() -> None:
    _, notes = fit(DDPStrategy())
    with open_job(Path(str(notes.path))) as job:
        (rank,) = job.snapshot().ranks
    assert rank.device.startswith("cuda:0")
    assert rank.memory.device_peak_bytes
    steps = rank.steps[5:]
    assert len(steps) > 20
    for step in steps:
        phases = {each.name: each.seconds for each in step.phases}
        assert phases["forward"] > 0
        assert phases["backward"] > 0
        assert sum(phases.values()) == pytest.approx(step.seconds, rel=0.2, abs=2e-3)
        assert step.loss is not None
