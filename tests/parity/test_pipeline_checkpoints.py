"""A pipeline's checkpoints go on in any layout, and those of others in a pipeline."""

from pathlib import Path

import pytest

from tests.support.continued_runs import Run, different, run_all
from tests.support.layouts import PLAIN

pytestmark = pytest.mark.ranks


def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    runs = [
        Run("1f1b, 2", 2, "whole"),
        Run("1f1b, 2", 1, "half"),
        Run("1f1b, 2", 2, "same", "half"),
    ]
    found = run_all(tmp_path, "stack", runs)
    assert different(found["same"], found["whole"], exact=True) == []


@pytest.mark.full
def test_runs_go_on_in_every_layout(tmp_path: Path) -> None:
    found = run_all(
        tmp_path,
        "stack",
        [
            Run("1f1b, 2", 2, "whole"),
            Run("1f1b, 2", 1, "half"),
            Run("1f1b, 2", 2, "same", "half"),
            Run("zbv, 2", 2, "as_zbv", "half"),
            Run("ZeRO-3, 2", 2, "as_zero", "half"),
            Run("ZeRO-3, 2", 1, "zero_half"),
            Run("interleaved 1f1b, 2", 2, "from_zero", "zero_half"),
        ],
    )
    assert different(found["same"], found["whole"], exact=True) == []
    found |= run_all(
        tmp_path,
        "stack",
        [
            Run(PLAIN, 2, "plain.ckpt"),
            Run(PLAIN, 1, "plain_half.ckpt"),
            Run("DDP, 1", 2, "as_ddp.ckpt", "half"),
            Run("DDP, 1", 1, "half.ckpt", "half"),  # trains nothing: a file of the directory
            Run(PLAIN, 2, "as_plain.ckpt", "half.ckpt"),
        ],
    )
    found |= run_all(
        tmp_path,
        "stack",
        [
            Run("1f1b, 4", 2, "as_four", "half"),
            Run("zero bubble, 4", 2, "from_plain", "plain_half.ckpt"),
        ],
    )
    for target, end in found.items():
        if "half" not in target:
            assert different(end, found["whole"]) == [], target
