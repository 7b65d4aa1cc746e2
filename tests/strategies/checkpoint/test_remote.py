"""Addresses of fsspec: files go anywhere, directories of shards to what the system serves."""

from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.strategies import DDPStrategy, ZeROStrategy
from boltmesh.strategies.checkpoint.manifest import find_fault
from tests.support.models import Regression, regression_data
from tests.support.ranks import run_ranks


def fit(strategy: Any, *callbacks: Any, **given: Any) -> tuple[Trainer, Regression]:
    seed_everything(3, verbose=False)
    module = Regression()
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=given.pop("max_steps", 4),
        logger=False, callbacks=list(callbacks), enable_checkpointing=bool(callbacks),
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, regression_data(48, 4), **given)
    return trainer, module


def weights(module: Regression) -> dict[str, torch.Tensor]:
    return {
        name: getattr(each, "full_tensor", lambda each=each: each)().detach().clone()
        for name, each in module.named_parameters()
    }


def go_anywhere(rank: int, world_size: int, folder: Path) -> None:
    replicas = DDPStrategy(telemetry=False)
    expected = weights(fit(replicas, max_steps=8)[1])

    # A file of replicas, in memory: from there both go on, replicas and shards.
    saver = ModelCheckpoint("memory://files", "{step}", every_n_train_steps=4)
    fit(DDPStrategy(telemetry=False), saver)
    assert fsspec.filesystem("memory").isfile("memory://files/step=4.ckpt")
    for strategy in (DDPStrategy(telemetry=False), ZeROStrategy(stage=2, telemetry=False)):
        _, module = fit(strategy, max_steps=8, ckpt_path="memory://files/step=4.ckpt")
        for name, each in weights(module).items():
            assert torch.allclose(each, expected[name], rtol=1e-5, atol=1e-7), name

    # A directory of shards: to file:// and back, to nowhere else.
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=4)
    trainer, _ = fit(ZeROStrategy(stage=2, telemetry=False), saver)
    trainer.save_checkpoint(f"file://{folder}/saved.ckpt")
    assert find_fault(folder / "saved.ckpt") is None
    address = f"file://{folder}/step=4.ckpt"
    _, module = fit(ZeROStrategy(stage=3, telemetry=False), max_steps=8, ckpt_path=address)
    for name, each in weights(module).items():
        assert torch.allclose(each, expected[name], rtol=1e-5, atol=1e-7), name
    with pytest.raises(CheckpointError, match="Choose a local or mounted folder"):
        trainer.save_checkpoint("memory://shards/saved.ckpt")
    with pytest.raises(ConfigError, match="ModelCheckpoint saves to memory://shards"):
        fit(ZeROStrategy(stage=2, telemetry=False), ModelCheckpoint("memory://shards"))
    fsspec.filesystem("memory").put(str(folder / "saved.ckpt"), "/copied.ckpt", recursive=True)
    for strategy in (DDPStrategy(telemetry=False), ZeROStrategy(stage=2, telemetry=False)):
        with pytest.raises(CheckpointError, match="Copy it to one, or mount it"):
            fit(strategy, ckpt_path="memory://copied.ckpt")


@pytest.mark.ranks
def test_files_go_to_any_address_and_directories_where_they_can_be_whole(tmp_path: Path) -> None:
    run_ranks(go_anywhere, 1, tmp_path)
