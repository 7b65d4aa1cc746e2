"""Weights to begin with; tests/parity/test_converted_checkpoints.py has the layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from boltmesh.errors import ConfigError
from boltmesh.strategies import StartingWeights
from tests.support.models import Regression, regression_data
from tests.support.shard_runs import QUIET


def test_a_path_with_nothing_is_refused_when_it_is_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        StartingWeights(str(tmp_path / "nowhere"))


def test_a_file_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"weights": {}}, tmp_path / "file.ckpt")
    callback = StartingWeights(str(tmp_path / "file.ckpt"))
    with pytest.raises(ConfigError, match="has no 'state_dict'"):
        callback.on_fit_start(Trainer(accelerator="cpu", **QUIET), Regression())


def test_a_run_that_resumes_has_its_own(tmp_path: Path) -> None:
    torch.save({"weights": {}}, tmp_path / "file.ckpt")
    callback = StartingWeights(str(tmp_path / "file.ckpt"))
    trainer: Any = Trainer(accelerator="cpu", max_epochs=1, **QUIET)
    module = Regression()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    resumed: Any = Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], **QUIET)
    resumed.fit(
        module, regression_data(4, 2), regression_data(4, 2), ckpt_path=tmp_path / "own.ckpt"
    )
    assert resumed.current_epoch == 1
