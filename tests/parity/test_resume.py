"""A run that stops and goes on in another layout ends where the run without a stop ends."""

from pathlib import Path
from typing import Any

import pytest

from tests.parity.resuming import Layout, Run, differences, go_on, read_whole, train

pytestmark = pytest.mark.ranks

OTHER_ORDER = 2e-5
"""Other numbers of ranks add gradients in another order; Adam amplifies what that changes."""


@pytest.mark.sample("3")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_directory_of_each_stage_goes_on_in_every_other_layout(
    tmp_path: Path, stage: int
) -> None:
    run = Run(trainer={"gradient_clip_val": 0.5})
    writer = Layout(2, {"stage": stage})
    whole = train(writer, run, tmp_path)
    saved = tmp_path / "epoch=0.ckpt"
    assert saved.is_dir()
    assert differences(read_whole(saved, run), whole) != []
    assert differences(whole, go_on(writer, run, saved, tmp_path / "same")) == []
    others = [Layout(1, {"stage": 1 + stage % 3}), Layout(4, {"stage": 1 + (stage + 1) % 3})]
    if stage == 3:
        others.append(Layout(2))
    for number, layout in enumerate(others):
        ended = go_on(layout, run, saved, tmp_path / str(number))
        assert differences(whole, ended, tolerance=OTHER_ORDER) == [], layout


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_file_of_ddp_goes_on_in_shards(tmp_path: Path, stage: int) -> None:
    run = Run()
    whole = train(Layout(2), run, tmp_path)
    saved = tmp_path / "epoch=0.ckpt"
    assert saved.is_file()
    for ranks in (1, 4):
        layout = Layout(ranks, {"stage": stage})
        ended = go_on(layout, run, saved, tmp_path / str(ranks))
        assert differences(whole, ended, tolerance=OTHER_ORDER) == []


@pytest.mark.full
def test_accumulation_and_frozen_layers_go_on(tmp_path: Path) -> None:
    run = Run({"has_frozen_layer": True}, accumulate=2)
    whole = train(Layout(2, {"stage": 2}), run, tmp_path)
    ended = go_on(Layout(1, {"stage": 3}), run, tmp_path / "epoch=0.ckpt", tmp_path / "again")
    assert differences(whole, ended, tolerance=OTHER_ORDER) == []


@pytest.mark.full
def test_sgd_whose_state_is_only_momentum_goes_on(tmp_path: Path) -> None:
    run = Run({"optimizer": "sgd"})
    whole = train(Layout(2, {"stage": 3}), run, tmp_path)
    ended = go_on(Layout(4, {"stage": 1}), run, tmp_path / "epoch=0.ckpt", tmp_path / "again")
    assert differences(whole, ended, tolerance=OTHER_ORDER) == []


@pytest.mark.full
def test_tiled_layers_go_on(tmp_path: Path) -> None:
    run = Run({"width": 64})
    tiled = Layout(2, {"stage": 3, "tile_linear_bytes": 4096})
    whole = train(tiled, run, tmp_path)
    ended = go_on(Layout(1, {"stage": 1}), run, tmp_path / "epoch=0.ckpt", tmp_path / "again")
    assert differences(whole, ended, tolerance=OTHER_ORDER) == []


@pytest.mark.full
def test_groups_that_hold_the_same_shards_go_on(tmp_path: Path) -> None:
    run = Run()
    whole = train(Layout(4, {"stage": 3, "shard_size": 2}), run, tmp_path)
    ended = go_on(Layout(2, {"stage": 1}), run, tmp_path / "epoch=0.ckpt", tmp_path / "again")
    assert differences(whole, ended, tolerance=OTHER_ORDER) == []


def offloaded(name: str, folder: Path) -> dict[str, Any]:
    """Arguments of ``ZeROStrategy`` by the names of the recipes."""
    return {
        "zero1_cpu": {"stage": 1, "offload_optimizer": "cpu"},
        "zero2_cpu": {"stage": 2, "offload_optimizer": "cpu", "offload_fraction": 0.5},
        "zero3_cpu": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        "zero3_nvme": {
            "stage": 3,
            "offload_optimizer": "nvme",
            "offload_parameters": "nvme",
            "offload_path": folder,
        },
    }[name]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1_cpu", "zero2_cpu", "zero3_cpu", "zero3_nvme"])
def test_offloaded_state_goes_on_in_another_layout(tmp_path: Path, name: str) -> None:
    run = Run()
    writer = Layout(2, offloaded(name, tmp_path))
    whole = train(writer, run, tmp_path / "whole")
    saved = tmp_path / "whole" / "epoch=0.ckpt"
    assert differences(whole, go_on(writer, run, saved, tmp_path / "same")) == []
    other = {
        "zero1_cpu": Layout(1, {"stage": 3}),
        "zero2_cpu": Layout(4, offloaded("zero3_cpu", tmp_path)),
        "zero3_cpu": Layout(1, offloaded("zero3_nvme", tmp_path)),
        "zero3_nvme": Layout(2),
    }[name]
    ended = go_on(other, run, saved, tmp_path / "other")
    assert differences(whole, ended, tolerance=OTHER_ORDER) == []


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1_cpu", "zero3_nvme"])
def test_a_file_of_ddp_goes_on_in_offloaded_state(tmp_path: Path, name: str) -> None:
    run = Run(trainer={"gradient_clip_val": 0.5})
    whole = train(Layout(2), run, tmp_path / "whole")
    layout = Layout(2, offloaded(name, tmp_path))
    ended = go_on(layout, run, tmp_path / "whole" / "epoch=0.ckpt", tmp_path / "again")
    assert differences(whole, ended, tolerance=OTHER_ORDER) == []
