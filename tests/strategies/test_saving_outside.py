"""A save that no run surrounds is refused by the strategies whose ranks have parts."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from boltmesh.errors import CheckpointError
from boltmesh.strategies import (
    DDPStrategy,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from tests.support.blocks import Blocks


def attached(strategy: Any) -> Trainer:
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    module = Blocks()
    module.trainer = trainer
    trainer.strategy.connect(module)
    return trainer


@pytest.mark.parametrize(
    "strategy",
    [
        ZeROStrategy(telemetry=False),
        TensorParallelStrategy(telemetry=False),
        PipelineParallelStrategy(telemetry=False),
        Parallel3DStrategy(telemetry=False, data=1, pipeline=2),
        Parallel3DStrategy(telemetry=False, data=1, tensor=2),
    ],
    ids=["zero", "tensor", "pipeline", "3d of stages", "3d of layers"],
)
def test_a_save_before_any_run_is_refused_with_what_to_write(tmp_path: Path, strategy: Any) -> None:
    with pytest.raises(CheckpointError) as told:
        attached(strategy).save_checkpoint(tmp_path / "a.ckpt")
    assert "Trainer.save_checkpoint was called outside of a run" in str(told.value)
    assert f"{strategy.public_name} writes what each of its ranks holds" in str(told.value)
    assert "torch.save({'state_dict': module.state_dict()}, path)" in str(told.value)
    assert not list(tmp_path.iterdir())


def test_replicas_save_what_each_process_has(tmp_path: Path) -> None:
    attached(DDPStrategy(telemetry=False)).save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").is_file()
