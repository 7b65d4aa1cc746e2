"""A run that is killed again and again, or told to stop, goes on to what it would have been."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from boltmesh.run_folder import newest_checkpoint
from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.checkpoint import directory, shard_writer
from boltmesh.strategies.checkpoint.atomic_replace import PARTIAL
from boltmesh.strategies.checkpoint.manifest import find_fault
from tests.support.killing import fatal
from tests.support.models import Regression, regression_data
from tests.support.ranks import RankFailure, run_ranks

pytestmark = [pytest.mark.ranks]

STEPS = 8


def build(world_size: int, folder: Path | None, *callbacks: Callback, **options: Any) -> Trainer:
    saver = [] if folder is None else [ModelCheckpoint(folder, "{step}", every_n_train_steps=1)]
    defaults = {
        "strategy": ZeROStrategy(stage=2, telemetry=False),
        "max_steps": STEPS,
        "enable_checkpointing": folder is not None,
    }
    return Trainer(
        accelerator="cpu", devices=world_size, logger=False, callbacks=[*saver, *callbacks],
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        **{**defaults, **options},
    )  # fmt: skip


def fit(trainer: Trainer, module: Regression, **given: Any) -> dict[str, Tensor]:
    """The parameters of a run, whole."""
    trainer.fit(module, regression_data(48, 4), regression_data(8, 4), **given)
    return {name: whole(each) for name, each in module.named_parameters()}


def whole(parameter: Tensor) -> Tensor:
    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return value.detach().clone()


def go_on(rank: int, world_size: int, folder: Path, victim: int, where: str) -> Any:
    """Go on from the newest checkpoint, until one rank is killed at some place."""
    seed_everything(3, verbose=False)
    module = Regression(dropout=0.2)
    found = newest_checkpoint(folder.parent.parent)
    callbacks = fatal(where, 5 if where == "save" else 4) if rank == victim else []
    trainer = build(world_size, folder, *callbacks)
    return fit(trainer, module, ckpt_path=found), None if found is None else found.name


def straight(rank: int, world_size: int) -> dict[str, Tensor]:
    seed_everything(3, verbose=False)
    return fit(build(world_size, None), Regression(dropout=0.2))


@pytest.mark.full
@pytest.mark.slow
def test_ranks_killed_in_a_step_a_resume_and_a_save_lose_no_step(tmp_path: Path) -> None:
    folder = tmp_path / "0" / "checkpoints"
    for victim, where in ((1, "step"), (0, "resume"), (1, "save"), (0, "save")):
        with pytest.raises(RankFailure, match="died with exit code -9"):
            run_ranks(go_on, 2, folder, victim, where)
    (found, name), _ = run_ranks(go_on, 2, folder, -1, "nowhere")
    # Killed in the step behind the fourth; in the save behind the sixth, twice.
    assert name == "step=5.ckpt"
    expected = run_ranks(straight, 2)[0]
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


class SignalAt(Callback):
    """Sends one rank a signal in the midst of a batch."""

    def __init__(self, signum: int, step: int) -> None:
        self.signum, self.step = signum, step

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.signum)


def requeue(rank: int, world_size: int, folder: Path, accumulated: int = 1) -> Any:
    scontrol = folder / "bin" / "scontrol"
    if rank == 0:
        scontrol.parent.mkdir(parents=True)
        scontrol.write_text(f"#!/bin/sh\necho $@ > {folder}/requeued\n")
        scontrol.chmod(0o755)
        for number in (1, 2):  # what kills have left of saves
            (folder / f"hpc-ckpt-{number}.ckpt{PARTIAL}").mkdir()
    os.environ.update(
        SLURM_JOB_ID="17", SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NODEID="0",
        SLURM_NTASKS=str(world_size), SLURM_NTASKS_PER_NODE=str(world_size),
        PATH=f"{folder}/bin:{os.environ['PATH']}",
    )  # fmt: skip
    seed_everything(3, verbose=False)
    callbacks = [SignalAt(signal.SIGUSR1, 3)] if rank == world_size - 1 else []
    trainer = build(
        world_size, None, *callbacks,
        # The job ends with the requeue: even so nothing is written behind it.
        strategy=ZeROStrategy(stage=2, telemetry=False, async_save=True),
        plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)],
        default_root_dir=folder, accumulate_grad_batches=accumulated,
    )  # fmt: skip
    expected = fit(trainer, Regression(dropout=0.2))
    seed_everything(5, verbose=False)
    again = build(world_size, None, default_root_dir=folder, accumulate_grad_batches=accumulated)
    found = fit(again, Regression(dropout=0.2))  # from what Lightning finds there
    return [name for name in expected if not torch.equal(expected[name], found[name])]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "accumulated"), [(2, 1), (1, 1), (1, 2)])
def test_slurms_signal_to_one_rank_saves_on_all_before_the_same_batch(
    tmp_path: Path, ranks: int, accumulated: int
) -> None:
    assert run_ranks(requeue, ranks, tmp_path, accumulated) == [[]] * ranks
    checkpoint = directory.load_directory(tmp_path / "hpc_ckpt_1.ckpt")
    assert checkpoint["global_step"] == 4
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    left = {each.name for each in tmp_path.iterdir()} - {"bin", "requeued"}
    assert left == {"hpc_ckpt_1.ckpt", "hpc-ckpt-2.ckpt.partial"}


def told_while_saving(rank: int, world_size: int, folder: Path) -> str:
    write = shard_writer._write_piece

    def tell_and_write(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return write(*args)

    mock.patch.object(shard_writer, "_write_piece", tell_and_write).start()
    saver = ModelCheckpoint(folder, "best", monitor="val_loss")
    trainer = build(world_size, None, saver, val_check_interval=3, enable_checkpointing=True)
    try:
        fit(trainer, Regression())
    except SystemExit as left:
        return f"left with {left.code}"
    return "trained to the end"


@pytest.mark.full
def test_sigterm_in_the_save_after_a_validation_waits_for_the_whole_checkpoint(
    tmp_path: Path,
) -> None:
    said = run_ranks(told_while_saving, 2, tmp_path)
    assert said == ["left with 143"] * 2
    assert find_fault(tmp_path / "best.ckpt") is None
    assert [each.name for each in tmp_path.iterdir()] == ["best.ckpt"]
