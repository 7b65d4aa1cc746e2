"""Whole commands with sharded state: stop, die, resume and evaluate from directories."""

from pathlib import Path
from typing import Any

import pytest
import torch

from boltmesh.strategies.checkpoint.directory import load_directory
from tests.cli.test_run_ranks import TINY, boltmesh, fit, stop_at
from tests.support.ranks import RankFailure

ZERO = "strategy.name=bolt_zero3"
EVERY = "checkpoint.every_n_steps=4"


def tensors(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = load_directory(path)
    found: dict[str, Any] = dict(checkpoint["state_dict"])
    for state in checkpoint["optimizer_states"]:
        for name, values in state["state"].items():
            found.update({f"{name}.{key}": value for key, value in values.items()})
    return {
        name: value.load() if hasattr(value, "load") else value for name, value in found.items()
    }


def assert_same(one: Path, other: Path) -> None:
    left, right = tensors(one), tensors(other)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.full
@pytest.mark.ranks
def test_stopped_resumed_and_evaluated(tmp_path: Path) -> None:
    epochs = "max_epochs=2"
    outcomes = boltmesh(
        tmp_path,
        fit(ZERO, epochs, "run.name=whole"),
        fit(ZERO, epochs, stop_at(5)),
        fit(ZERO, epochs, stop_at(3), "resume=auto"),
        fit(ZERO, epochs, "resume=auto"),
        ["validate", str(TINY), ZERO],
        ["test", str(TINY), "ckpt_path=runs/tiny/0/checkpoints/last.ckpt"],
        ["predict", str(TINY), ZERO],
    )
    codes = [[code for code, _, _ in each] for each in outcomes]
    assert codes == [[0, 0], [130, 130], [130, 130], [0, 0], [0, 0], [0, 0], [0, 0]], outcomes
    kept = tmp_path / "runs/tiny/0/checkpoints"
    stopped = [each.name for each in kept.glob("interrupted-*")]
    assert len(stopped) == 1, "the second stop takes the place of the first"
    assert stopped[0] in outcomes[2][1][2] or stopped[0] in outcomes[2][0][2]
    assert f"from runs/tiny/0/checkpoints/{stopped[0]}" in outcomes[3][0][1]
    assert_same(kept / "last.ckpt", tmp_path / "runs/whole/0/checkpoints/last.ckpt")


@pytest.mark.full
@pytest.mark.ranks
def test_a_rank_that_is_killed_in_a_step_is_made_good_by_resuming(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    nvme = ("strategy.name=bolt_zero3_nvme", f"strategy.offload_path={swap}")
    with pytest.raises(RankFailure, match="died with exit code -9"):
        boltmesh(tmp_path, fit(*nvme, EVERY, "max_epochs=1", "model.init_args.kill_at=6"))
    assert list(swap.iterdir()) == []
    kept = tmp_path / "runs/tiny/0/checkpoints"
    assert [each.name for each in kept.iterdir() if each.name != "last.ckpt"] == [
        "epoch=0-step=4.ckpt"
    ]
    whole, resumed = boltmesh(
        tmp_path,
        fit(*nvme, EVERY, "max_epochs=1", "run.name=whole"),
        fit(*nvme, EVERY, "max_epochs=1", "resume=auto"),
    )
    assert [code for code, _, _ in (*whole, *resumed)] == [0, 0, 0, 0], resumed
    assert "from runs/tiny/0/checkpoints/" in resumed[0][1]
    assert_same(kept / "last.ckpt", tmp_path / "runs/whole/0/checkpoints/last.ckpt")


@pytest.mark.full
@pytest.mark.ranks
def test_an_incomplete_directory_is_refused_before_ranks_start(tmp_path: Path) -> None:
    half = tmp_path / "half.ckpt"
    half.mkdir()
    (outcome,) = boltmesh(tmp_path, fit(ZERO, f"resume={half}"))
    assert [code for code, _, _ in outcome] == [2, 2]
    error = outcome[0][2]
    assert "is a directory, but no complete checkpoint: it has no manifest.json" in error
