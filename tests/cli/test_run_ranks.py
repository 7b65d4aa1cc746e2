"""Whole commands on two ranks that a launcher has started: fit, stop, resume, evaluate."""

import contextlib
import csv
import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from boltmesh import cli
from boltmesh.configs.load import load
from boltmesh.launch import graceful_stop
from tests.support.ranks import run_ranks

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
SIGNAL_AT = f"{TINY.with_name('tiny.py')}:SignalAt"


def commands(rank: int, world_size: int, folder: str, lines: list[list[str]]) -> list[Any]:
    """Run command lines one after another; return the code, stdout and stderr of each."""
    os.chdir(folder)
    graceful_stop.CHECK_EVERY_S = 0.0  # at every step, so that a test stops where it means to
    outcomes = []
    for number, line in enumerate(lines):
        errors = Path(folder, f"stderr-{rank}-{number}")
        out = io.StringIO()
        kept = os.dup(2)
        with errors.open("wb") as file, contextlib.redirect_stdout(out):
            os.dup2(file.fileno(), 2)
            try:
                code = cli.run_command(line)
            finally:
                os.dup2(kept, 2)
        outcomes.append((code, out.getvalue(), errors.read_text()))
    return outcomes


def boltmesh(folder: Path, *lines: list[str]) -> list[list[Any]]:
    """The outcome of each line on each rank."""
    by_rank = run_ranks(commands, 2, str(folder), list(lines))
    return [list(each) for each in zip(*by_rank, strict=True)]


def fit(*overrides: str) -> list[str]:
    return ["fit", str(TINY), *overrides]


def stop_at(batch: int, **more: Any) -> str:
    arguments = ", ".join(f"{key}: {value}" for key, value in {"batch": batch, **more}.items())
    return f"trainer.callbacks=[{{class_path: '{SIGNAL_AT}', init_args: {{{arguments}}}}}]"


def metrics(run: Path) -> dict[str, dict[str, str]]:
    """What all starts of a run have logged, by step."""
    rows: dict[str, dict[str, str]] = {}
    for path in sorted(run.glob("logs/*/metrics.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                rows.setdefault(row["step"], {}).update({k: v for k, v in row.items() if v})
    return rows


def checkpoint(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


@pytest.mark.ranks
def test_fit_then_evaluate(tmp_path):
    fitted, again, validated, tested, predicted = boltmesh(
        tmp_path,
        fit("max_epochs=1", "checkpoint.monitor=val_loss"),
        fit("max_epochs=1"),
        ["validate", str(TINY)],
        ["test", str(TINY), "ckpt_path=runs/tiny/0/checkpoints/last.ckpt"],
        ["predict", str(TINY)],
    )
    for outcome in (fitted, again, validated, tested, predicted):
        assert [code for code, _, _ in outcome] == [0, 0], outcome
        assert outcome[1][1] == "", "rank 0 speaks for all"

    said = fitted[0][1]
    assert said.startswith(
        "boltmesh: fit tiny on 2 ranks into runs/tiny/0; watch it: boltmesh top "
    )
    assert "boltmesh: trained 12 steps in" in said
    assert "samples/s" in said
    for name in ("train loss", "val_loss", "checkpoint", "look back"):
        assert f"\n  {name}" in said
    assert "runs/tiny/0/checkpoints/epoch=0-step=12.ckpt (val_loss " in said

    # The stored config is a config, and stands beside the checkpoints.
    stored = load(tmp_path / "runs/tiny/0/config.yaml")
    assert stored.run.checkpoint.monitor == "val_loss"
    assert stored.run.name == "tiny"
    assert "runs/tiny/1;" in again[0][1], "a second run does not write over the first"
    assert (tmp_path / "runs/tiny/1/checkpoints/last.ckpt").is_file()

    assert "from runs/tiny/1/checkpoints/" in validated[0][1], "auto is the newest"
    assert "val_loss" in validated[0][1]
    assert "test_loss" in tested[0][1]
    assert (
        "boltmesh: predictions in runs/tiny/2/predictions: rank-0.pt to rank-1.pt"
        in predicted[0][1]
    )
    parts = [torch.load(tmp_path / f"runs/tiny/2/predictions/rank-{rank}.pt") for rank in (0, 1)]
    assert sum(len(batch) for part in parts for batch in part["predictions"]) == 96


@pytest.mark.sample("in the middle of an epoch-overrides0-17")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "overrides", "batch"),
    [
        ("in the middle of an epoch", (), 17),
        ("inside an accumulation window", ("accumulate_grad_batches=5",), 16),
        ("when a validation is due", ("val_check_interval=4",), 16),
        ("at the end of an epoch", (), 12),
    ],
)
def test_a_stopped_and_resumed_run_equals_one_that_was_not(tmp_path, case, overrides, batch):
    whole, stopped, resumed = boltmesh(
        tmp_path,
        fit("max_epochs=3", "run.name=whole", *overrides),
        fit("max_epochs=3", "run.name=cut", *overrides, stop_at(batch)),
        fit("max_epochs=3", "run.name=cut", *overrides, "resume=auto"),
    )
    assert [code for code, _, _ in whole] == [0, 0]
    assert [code for code, _, _ in stopped] == [130, 130], "one rank had the signal, both end"
    assert [code for code, _, _ in resumed] == [0, 0]
    assert stopped[1][2].count("boltmesh: stopping after this step") == 1
    (kept,) = (tmp_path / "runs/cut/0/checkpoints").glob("interrupted-step=*.ckpt")
    assert (
        f"checkpoint: runs/cut/0/checkpoints/{kept.name}; resume with: boltmesh fit"
        in stopped[0][2]
    )
    assert "stopped by Ctrl-C" not in stopped[1][2], "rank 0 speaks for all"
    assert f"from runs/cut/0/checkpoints/{kept.name} into runs/cut/0;" in resumed[0][1]

    one = checkpoint(tmp_path / "runs/whole/0/checkpoints/last.ckpt")
    other = checkpoint(tmp_path / "runs/cut/0/checkpoints/last.ckpt")
    for part in ("state_dict", "optimizer_states", "global_step", "epoch"):
        assert_same(one[part], other[part])
    assert metrics(tmp_path / "runs/whole/0") == metrics(tmp_path / "runs/cut/0")


@pytest.mark.full
@pytest.mark.ranks
def test_sigterm_stops_like_ctrl_c(tmp_path):
    (stopped,) = boltmesh(tmp_path, fit(stop_at(5, rank=0, signum=int(signal.SIGTERM))))
    assert [code for code, _, _ in stopped] == [143, 143]
    assert "boltmesh: stopped by SIGTERM after step 5;" in stopped[0][2]


@pytest.mark.full
@pytest.mark.ranks
def test_resume_auto_without_a_checkpoint_starts_at_the_beginning(tmp_path):
    started, ended = boltmesh(
        tmp_path, fit("max_epochs=1", "resume=auto"), fit("max_epochs=1", "resume=auto")
    )
    assert [code for code, _, _ in started] == [0, 0]
    assert "fit tiny on 2 ranks into runs/tiny/0;" in started[0][1]
    assert [code for code, _, _ in ended] == [0, 0]
    assert "boltmesh: nothing is left to train after step 12" in ended[0][1]


@pytest.mark.full
@pytest.mark.ranks
def test_resuming_from_a_path_leaves_the_old_run_as_it_is(tmp_path):
    _, resumed = boltmesh(
        tmp_path,
        fit("max_epochs=1"),
        fit("max_epochs=2", "resume=runs/tiny/0/checkpoints/last.ckpt"),
    )
    assert [code for code, _, _ in resumed] == [0, 0]
    assert checkpoint(tmp_path / "runs/tiny/0/checkpoints/last.ckpt")["global_step"] == 12
    assert checkpoint(tmp_path / "runs/tiny/1/checkpoints/last.ckpt")["global_step"] == 24


@pytest.mark.full
@pytest.mark.ranks
def test_a_mistake_is_said_by_one_rank_and_leaves_no_folder(tmp_path):
    misspelt, uneven, wrong = boltmesh(
        tmp_path, fit("strategy.bucket_cap=1"), fit("devices=3"), fit("strategy.bucket_cap_mb=0")
    )
    for outcome in (misspelt, uneven, wrong):
        assert [code for code, _, _ in outcome] == [2, 2]
        assert outcome[1][2] == "", "the first rank of a host speaks for all"
    assert misspelt[0][2] == (
        "boltmesh: command line: unknown key 'strategy.bucket_cap': DDPStrategy does not take it. "
        "Did you mean 'strategy.bucket_cap_mb'?\n"
    )
    assert uneven[0][2] == (
        "boltmesh: trainer.devices=3 x trainer.num_nodes=1 needs 3 ranks, but torchrun has "
        "started 2 ranks. Set trainer.devices=2, or start 3.\n"
    )
    assert "boltmesh: " in wrong[0][2]
    assert not (tmp_path / "runs").exists()


@pytest.mark.ranks
def test_the_optimizer_section_replaces_the_modules_own(tmp_path):
    (fitted,) = boltmesh(
        tmp_path,
        fit(
            "max_epochs=2",
            "optimizer.class_path=torch.optim.SGD",
            "optimizer.init_args.lr=0.5",
            "optimizer.scheduler.class_path=torch.optim.lr_scheduler.StepLR",
            "optimizer.scheduler.init_args={step_size: 1, gamma: 0.1}",
        ),
    )
    assert [code for code, _, _ in fitted] == [0, 0]
    state = checkpoint(tmp_path / "runs/tiny/0/checkpoints/last.ckpt")
    group = state["optimizer_states"][0]["param_groups"][0]
    assert "momentum" in group
    assert group["lr"] == pytest.approx(0.5 * 0.1**2)


@pytest.mark.full
@pytest.mark.ranks
def test_nothing_is_kept_when_checkpoints_are_off(tmp_path):
    (stopped,) = boltmesh(tmp_path, fit("checkpoint.enabled=false", stop_at(5)))
    assert [code for code, _, _ in stopped] == [130, 130]
    assert "after step 5; no checkpoint was written for it." in stopped[0][2]
    assert not list(tmp_path.glob("runs/**/*.ckpt"))
