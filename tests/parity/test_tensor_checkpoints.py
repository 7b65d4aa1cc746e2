"""A tensor group's checkpoints go on in any layout, and those of others in a tensor group."""

from pathlib import Path

import pytest

from tests.support.continued_runs import Run, different, run_all
from tests.support.layouts import PLAIN

pytestmark = pytest.mark.ranks


@pytest.mark.full
def test_runs_go_on_in_every_layout(tmp_path: Path) -> None:
    found = run_all(
        tmp_path,
        "gpt",
        [
            Run("tensor, 2", 2, "whole"),
            Run("tensor, 2", 1, "half", keeps_epochs=True),
            Run("tensor, 2", 2, "same", "half"),
            Run("tensor, 2", 2, "of_callback", "half-epochs/epoch=0.ckpt"),
            Run("ZeRO-3, 2", 2, "as_zero", "half"),
            Run("ZeRO-3, 2", 1, "zero_half"),
            Run("tensor, 2", 2, "from_zero", "zero_half"),
            Run("1f1b, 2", 2, "as_pipeline", "half"),
            Run("1f1b, 2", 1, "pipeline_half"),
            Run("tensor, 2", 2, "from_pipeline", "pipeline_half"),
        ],
    )
    for again in ("same", "of_callback"):
        assert different(found[again], found["whole"], exact=True) == []
    found |= run_all(
        tmp_path,
        "gpt",
        [
            Run(PLAIN, 2, "plain.ckpt"),
            Run(PLAIN, 1, "plain_half.ckpt"),
            Run("DDP, 1", 2, "as_ddp.ckpt", "half"),
            Run("DDP, 1", 1, "half.ckpt", "half"),  # trains nothing: a file of the directory
            Run(PLAIN, 2, "as_plain.ckpt", "half.ckpt"),
            Run("tensor, 1", 2, "as_one", "half"),
        ],
    )
    found |= run_all(
        tmp_path,
        "gpt",
        [
            Run("tensor, 4", 2, "as_four", "half"),
            Run("data 2 x tensor 2", 2, "as_two_groups", "half"),
            Run("tensor, 4", 2, "from_plain", "plain_half.ckpt"),
            Run("tensor, 4", 1, "four_half"),
            Run("data 2 x tensor 2", 2, "two_groups_from_four", "four_half"),
        ],
    )
    for target, end in found.items():
        if "half" not in target:
            assert different(end, found["whole"]) == [], target


@pytest.mark.full
def test_stages_of_shared_layers_go_on_in_every_layout(tmp_path: Path) -> None:
    found = run_all(tmp_path, "gpt", [Run(PLAIN, 2, "plain.ckpt"), Run(PLAIN, 1, "half.ckpt")])
    both = "pipeline 2 x tensor 2"
    found |= run_all(
        tmp_path,
        "gpt",
        [
            Run(both, 2, "whole"),
            Run(both, 1, "half"),
            Run(both, 2, "same", "half"),
            Run(both, 2, "from_plain", "half.ckpt"),
            Run("tensor, 4", 2, "as_four", "half"),
        ],
    )
    assert different(found["same"], found["whole"], exact=True) == []
    found |= run_all(
        tmp_path,
        "gpt",
        [
            Run("DDP, 1", 1, "half_of_both.ckpt", "half"),  # trains nothing: a file of it
            Run(PLAIN, 2, "as_plain.ckpt", "half_of_both.ckpt"),
            Run("tensor, 1", 2, "as_one", "half"),
        ],
    )
    for target, end in found.items():
        if "half" not in target:
            assert different(end, found["plain.ckpt"]) == [], target
