"""Checkpoints of ranks that share layers and shards go on in any layout, and those of others there.

Of a parameter each rank has the part that the tensor plan gives it, and of that part its shard.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from boltmesh.cli import run_command
from boltmesh.strategies.checkpoint.optimizer_state import parameter_names
from tests.support.continued_runs import MODELS, Run, different, run_all
from tests.support.layouts import PLAIN

pytestmark = pytest.mark.ranks


GRID = "data 2 x tensor 2"


@pytest.mark.full
def test_a_run_of_two_axes_goes_on_in_every_layout(tmp_path: Path) -> None:
    found = run_all(
        tmp_path,
        "gpt",
        [
            Run(f"{GRID}, ZeRO-3", 1, "half"),
            Run(f"{GRID}, ZeRO-3", 2, "again", "half"),
            Run(f"{GRID}, ZeRO-1", 2, "as_stage_1", "half"),
            Run("tensor, 4", 2, "as_tensor", "half"),
        ],
    )
    found |= run_all(
        tmp_path,
        "gpt",
        [
            Run(PLAIN, 2, "plain.ckpt"),
            Run("DDP, 1", 1, "grid_half.ckpt", "half"),  # trains nothing: a file of the directory
            Run(PLAIN, 2, "as_plain.ckpt", "grid_half.ckpt"),
        ],
    )
    ends_as_plain(found)


@pytest.mark.full
def test_runs_of_other_layouts_go_on_in_two_axes(tmp_path: Path) -> None:
    found = run_all(tmp_path, "gpt", [Run(PLAIN, 2, "plain.ckpt"), Run(PLAIN, 1, "half.ckpt")])
    found |= run_all(
        tmp_path,
        "gpt",
        [
            Run("ZeRO-3, 4", 1, "zero_half"),
            Run(f"{GRID}, ZeRO-1 on the CPU", 2, "from_zero", "zero_half"),
            Run(f"{GRID}, ZeRO-3", 2, "from_plain", "half.ckpt"),
        ],
    )
    ends_as_plain(found)


def ends_as_plain(found: dict[str, dict[str, torch.Tensor]]) -> None:
    """Check that runs to the end ended as the one of one process that was not interrupted."""
    for target, end in found.items():
        if "half" not in target:
            assert different(end, found["plain.ckpt"]) == [], target


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "layout"),
    [("stack", "data 2 x pipeline 2, ZeRO-1"), ("gpt", "data 2 x tensor 2, ZeRO-3")],
)
def test_what_four_ranks_hold_is_exported_to_the_bit(
    tmp_path: Path, model: str, layout: str
) -> None:
    held = run_all(tmp_path, model, [Run(layout, 1, "half")])["half"]
    line = ["export", str(tmp_path / "half"), "--to", str(tmp_path / "plain.ckpt")]
    assert run_command(line) == 0
    checkpoint = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    # As plain Lightning reads it.
    module = type(MODELS[model].model()).load_from_checkpoint(
        tmp_path / "plain.ckpt", weights_only=True
    )
    found = {name: each.detach() for name, each in module.named_parameters()}
    configured: Any = module.configure_optimizers()
    ((optimizer,), _) = configured
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    parameters = dict(module.named_parameters())
    for name in (each for group in parameter_names(module, optimizer) for each in group):
        for key, value in optimizer.state[parameters[name]].items():
            found[f"{name}.{key}"] = value
    rates = {name: each for name, each in held.items() if name.startswith("lr of group")}
    assert different(found | rates, held, exact=True) == []
    # It goes on there, too.
    ends = run_all(
        tmp_path, model, [Run(PLAIN, 2, "whole.ckpt"), Run(PLAIN, 2, "end.ckpt", "plain.ckpt")]
    )
    assert different(ends["end.ckpt"], ends["whole.ckpt"]) == []
