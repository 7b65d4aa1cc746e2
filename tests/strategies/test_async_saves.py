"""A checkpoint written beside training is that of its step, complete or absent."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor

from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.strategies import DDPStrategy, PipelineParallelStrategy, ZeROStrategy
from boltmesh.strategies.checkpoint import directory, file, manifest
from boltmesh.strategies.checkpoint.async_save import refuse_beside
from boltmesh.strategies.checkpoint.directory import load_directory
from boltmesh.strategies.checkpoint.file import AtomicCheckpointIO
from boltmesh.strategies.checkpoint.manifest import find_fault
from boltmesh.strategies.checkpoint.shard_reader import Placeholder
from tests.support.blocks import Blocks
from tests.support.models import regression_data
from tests.support.ranks import RankFailure, run_ranks

STEPS = 6
SAVED_AT = (2, 4, 6)

STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp": DDPStrategy,
    "zero": lambda **options: ZeROStrategy(stage=3, offload_optimizer="cpu", **options),
    "pipeline": lambda **options: PipelineParallelStrategy(microbatches=2, **options),
}


class Progress(Callback):
    """Notes at which step the trainer is."""

    step = 0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        Progress.step = trainer.global_step


class RaiseAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise ValueError("the user's own")


def build(world_size: int, strategy: Any, folder: Path, *callbacks: Callback, top_k: int) -> Any:
    monitor = None if top_k < 0 else "progress"
    saver = ModelCheckpoint(
        folder, "{step}", monitor, every_n_train_steps=2, save_top_k=top_k, mode="max"
    )
    return Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=STEPS, logger=False,
        callbacks=[saver, *callbacks], enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, use_distributed_sampler=False,
    )  # fmt: skip


class Straight(Blocks):
    """Logs the step, so that the newest checkpoint is the best."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("progress", float(self.global_step))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def values(checkpoint: Any) -> Any:
    """What a checkpoint holds, with tensors in the place of placeholders."""
    if isinstance(checkpoint, Placeholder):
        return checkpoint.load()
    if isinstance(checkpoint, dict):
        return {key: values(each) for key, each in checkpoint.items() if key != "callbacks"}
    if isinstance(checkpoint, (list, tuple)):
        return [values(each) for each in checkpoint]
    return checkpoint


def read(path: Path) -> Any:
    if path.is_dir():
        return values(load_directory(path))
    return values(torch.load(path, weights_only=True))


def different(one: Any, other: Any, name: str = "") -> list[str]:
    if isinstance(one, dict) and one.keys() == other.keys():
        return [at for key in one for at in different(one[key], other[key], f"{name}.{key}")]
    if isinstance(one, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [at for number, pair in pairs for at in different(*pair, f"{name}.{number}")]
    if isinstance(one, Tensor):
        return [] if torch.equal(one, other) else [name]
    return [] if one == other else [name]


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when it holds, or after what none that holds needs."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def save_both_ways(rank: int, world_size: int, folder: Path, name: str) -> Any:
    moved: list[int] = []

    def late(write: Any, *, is_async: bool) -> Any:
        def written(*args: Any, **kwargs: Any) -> Any:
            saved = SAVED_AT[len(moved)]
            if is_async and saved < STEPS:  # steps go on meanwhile, with values of their own
                wait_until(lambda: Progress.step >= saved)
            result = write(*args, **kwargs)
            moved.append(Progress.step - (saved - 1))
            return result

        return written

    for is_async in (False, True):
        owner, what = (file, "replace") if name == "ddp" else (directory, "_write_shards")
        with mock.patch.object(owner, what, late(getattr(owner, what), is_async=is_async)):
            seed_everything(7, verbose=False)
            strategy = STRATEGIES[name](async_save=is_async, telemetry=False)
            trainer = build(world_size, strategy, folder / str(is_async), Progress(), top_k=-1)
            trainer.fit(Straight(), regression_data(96, 8))
        if not is_async:
            assert not any(moved)
            moved.clear()
    return moved


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_written_beside_training_is_the_step_at_which_it_was_saved(
    tmp_path: Path, name: str
) -> None:
    moved = run_ranks(save_both_ways, 2, tmp_path, name)
    assert len(moved[0]) == len(SAVED_AT)
    assert min(moved[0][:-1]) > 0, "training waited for the disk"
    names = {f"step={step}.ckpt" for step in SAVED_AT}
    for folder in ("False", "True"):
        assert {each.name for each in (tmp_path / folder).iterdir()} == names
    for each in names:
        one, other = (read(tmp_path / folder / each) for folder in ("False", "True"))
        assert different(one, other) == []


def fail_later(rank: int, world_size: int, folder: Path, how: str) -> str:
    strategy = ZeROStrategy(stage=2, async_save=True, telemetry=False)
    callbacks = [RaiseAt(2)] if how == "raise" else []
    trainer = build(world_size, strategy, folder, *callbacks, top_k=1)
    write_manifest, num_writes = manifest.write_manifest, 0

    def fail(*args: Any, **kwargs: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        time.sleep(0.3)
        if num_writes == 2 and how == "full disk":
            raise OSError(28, "No space left on device")
        if num_writes == 2 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        write_manifest(*args, **kwargs)

    mock.patch.object(directory, "write_manifest", fail).start()
    try:
        trainer.fit(Straight(), regression_data(96, 8))
    except (CheckpointError, ValueError) as error:
        return f"{type(error).__name__} at {trainer.global_step}: {error}"
    return "trained"


@pytest.mark.full
@pytest.mark.ranks
def test_a_disk_that_fills_up_ends_the_run_at_the_next_save_with_the_old_checkpoint_there(
    tmp_path: Path,
) -> None:
    for each in run_ranks(fail_later, 2, tmp_path, "full disk"):
        assert each.startswith("CheckpointError at 6: ")
        assert "step=4.ckpt could not be written: " in each
        assert "No space left on device" in each
    assert [each.name for each in tmp_path.iterdir()] == ["step=2.ckpt"]
    assert find_fault(tmp_path / "step=2.ckpt") is None


@pytest.mark.ranks
def test_a_kill_while_one_is_written_leaves_the_one_that_it_replaces(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="died with exit code -9"):
        run_ranks(fail_later, 2, tmp_path, "kill")
    assert find_fault(tmp_path / "step=2.ckpt") is None
    assert not (tmp_path / "step=4.ckpt").exists()


@pytest.mark.full
@pytest.mark.ranks
def test_an_error_of_training_waits_for_the_checkpoint_that_is_being_written(
    tmp_path: Path,
) -> None:
    said = run_ranks(fail_later, 2, tmp_path, "raise")
    assert said == ["ValueError at 2: the user's own"] * 2
    assert find_fault(tmp_path / "step=2.ckpt") is None


def trainer_with(*callbacks: Callback) -> Trainer:
    return Trainer(accelerator="cpu", callbacks=list(callbacks), logger=False)


def test_what_would_count_on_a_checkpoint_too_early_is_refused(tmp_path: Path) -> None:
    plain = AtomicCheckpointIO()
    link = trainer_with(ModelCheckpoint(tmp_path, save_last="link"))
    with pytest.raises(ConfigError, match="save_last='link'"):
        refuse_beside(link, plain, keeps_state_on_disk=False)
    one, other = ModelCheckpoint(tmp_path, monitor="a"), ModelCheckpoint(tmp_path)
    twice = trainer_with(one, other)
    with pytest.raises(ConfigError, match="under the same name"):
        refuse_beside(twice, plain, keeps_state_on_disk=False)
    with pytest.raises(ConfigError, match="offload to 'nvme'"):
        refuse_beside(trainer_with(), plain, keeps_state_on_disk=True)
    with pytest.raises(ConfigError, match="never call AsyncCheckpointIO"):
        refuse_beside(trainer_with(), AsyncCheckpointIO(plain), keeps_state_on_disk=False)
    other.filename = "other"
    refuse_beside(twice, plain, keeps_state_on_disk=False)


def test_lightnings_own_way_is_refused_with_ours_named() -> None:
    with pytest.raises(ConfigError, match="give the strategy async_save=True"):
        Trainer(
            accelerator="cpu", devices=2, strategy=ZeROStrategy(), plugins=[AsyncCheckpointIO()],
            logger=False,
        )  # fmt: skip
