"""How a run ends with a loss of no use or a disk that is full, and which files others may read."""

import csv
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from omegaconf import OmegaConf

from boltmesh.cli import run_command
from boltmesh.configs.load import load
from boltmesh.run_callbacks import RunLogger
from boltmesh.run_folder import store_config
from tests.cli.conftest import TINY
from tests.cli.test_run_ranks import metrics


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_loss_that_is_not_finite_at_the_end_is_a_failure(workplace: Path, capfd) -> None:
    line = ["fit", str(TINY), "devices=1", "max_steps=4"]
    assert run_command([*line, "model.init_args.learning_rate=1e30"]) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert "the training loss is " in said
    assert " after step 4, so its last checkpoints are of no use" in said
    assert run_command(line) == 0


def test_rows_that_cannot_be_written_are_kept_and_the_training_goes_on(
    tmp_path: Path, capfd
) -> None:
    logger = RunLogger(tmp_path, name="logs", version="0")
    path = Path(logger.log_dir, "metrics.csv")
    logger.log_metrics({"loss": 3.0}, step=0)
    logger.save()
    path.rename(path.with_name("away"))
    path.mkdir()
    for step in (1, 2):
        logger.log_metrics({"loss": 2.0}, step=step)
        logger.save()
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"{path} cannot be written: Is a directory" in said
    path.rmdir()
    path.with_name("away").rename(path)
    logger.finalize("success")
    assert [row["step"] for row in rows(path)] == ["0", "1", "2"]


def test_a_row_that_is_logged_twice_is_written_once(tmp_path: Path) -> None:
    logger = RunLogger(tmp_path, name="logs", version="0")
    given = [({"loss": float("nan")}, 0), ({"loss": float("nan")}, 0), ({"loss": 1.0}, 1)]
    for row, step in given:
        logger.log_metrics(row, step=step)
    logger.finalize("success")
    found = rows(Path(logger.log_dir, "metrics.csv"))
    assert [(each["step"], each["loss"]) for each in found] == [("0", "nan"), ("1", "1.0")]


class FailBeforeLog(Callback):
    """Raises behind the hooks of the third step, which save it, and before Lightning logs it."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            vars(pl_module)["on_train_batch_end"] = self.fail
        pl_module.log("steps", float(trainer.global_step))

    def fail(self, *args: Any) -> None:
        raise ValueError("planted")


def test_a_step_that_a_checkpoint_has_is_logged_also_if_the_run_ends_there(
    workplace: Path,
) -> None:
    fails = f"trainer.callbacks=[{{class_path: '{__file__}:FailBeforeLog'}}]"
    line = ["fit", str(TINY), "devices=1", "max_steps=5", "checkpoint.every_n_steps=1"]
    assert run_command([*line, fails]) == 1
    (log,) = Path("runs/tiny/0/logs").iterdir()
    found = rows(log / "metrics.csv")
    assert [row["step"] for row in found] == ["0", "1", "2"]
    assert [row["steps"] for row in found] == ["1.0", "2.0", "3.0"]
    assert run_command([*line, "resume=auto"]) == 0
    assert list(metrics(Path("runs/tiny/0"))) == ["0", "1", "2", "3", "4"]


def test_rows_that_are_half_written_are_not_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = RunLogger(tmp_path, name="logs", version="0")
    logger.log_metrics({"loss": 3.0}, step=0)
    logger.save()
    path = Path(logger.log_dir, "metrics.csv")

    def fill(writer: csv.DictWriter, given: list) -> None:
        with path.open("a") as file:
            file.write("2.0,")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(csv.DictWriter, "writerows", fill)
        logger.log_metrics({"loss": 2.0}, step=1)
        logger.save()
    logger.save()
    assert [row["step"] for row in rows(path)] == ["0", "1"]


def test_a_new_column_that_cannot_be_written_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = RunLogger(tmp_path, name="logs", version="0")
    logger.log_metrics({"loss": 3.0}, step=0)
    logger.save()
    path = Path(logger.log_dir, "metrics.csv")
    before = path.read_bytes()

    def fill(writer: csv.DictWriter, given: list) -> None:
        assert path.read_bytes() == before, "a kill now finds all rows"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(csv.DictWriter, "writerows", fill)
        logger.log_metrics({"val_loss": 2.0}, step=1)
        logger.save()
    assert [each.name for each in path.parent.iterdir()] == ["metrics.csv"]
    logger.save()
    found = [(row["step"], row["loss"], row["val_loss"]) for row in rows(path)]
    assert found == [("0", "3.0", ""), ("1", "", "2.0")]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_others_cannot_read_files_with_secrets(tmp_path: Path) -> None:
    config = load(str(TINY), [])
    assert mode(store_config(config, tmp_path)) & 0o044
    OmegaConf.update(config, "model.init_args", {"api_key": "s3cret"}, force_add=True)
    assert mode(store_config(config, tmp_path)) == 0o600
    assert mode(store_config(load(str(TINY), []), tmp_path)) & 0o044
    for given, expected in (({"width": 3}, 0o644), ({"wandb": {"api_key": "s3cret"}}, 0o600)):
        logger = RunLogger(tmp_path, name="logs", version=str(len(given)) + str(expected))
        logger.log_hyperparams(given)
        assert mode(Path(logger.log_dir, "hparams.yaml")) == expected


def test_steps_are_saved_beside_the_best_by_a_value(workplace: Path) -> None:
    keep = ["checkpoint.monitor=val_loss", "checkpoint.every_n_steps=2", "val_check_interval=3"]
    line = ["fit", str(TINY), "devices=1", *keep]
    assert run_command([*line, "max_steps=2"]) == 0
    assert saved_steps(0) == {"epoch=0-step=2.ckpt": 2, "last.ckpt": 2}
    assert run_command([*line, "max_steps=5"]) == 0
    assert saved_steps(1) == {"epoch=0-step=3.ckpt": 3, "epoch=0-step=4.ckpt": 4, "last.ckpt": 4}
    assert run_command([*line, "max_steps=6", "resume=auto"]) == 0
    found = saved_steps(1)
    assert found.pop("last.ckpt") == 6
    assert set(found.values()) == {6}


def saved_steps(number: int) -> dict[str, int]:
    folder = Path(f"runs/tiny/{number}/checkpoints")
    return {
        each.name: torch.load(each, weights_only=False)["global_step"] for each in folder.iterdir()
    }
