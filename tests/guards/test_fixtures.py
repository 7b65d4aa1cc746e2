"""What an earlier version wrote can still be read: its checkpoints to the bit, its recording."""

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from boltmesh.cli import run_command
from tests.guards.make_fixtures import (
    DATA,
    LAYOUTS,
    content,
    fit,
    merged,
    numbers,
    summary,
)
from tests.support.ranks import run_ranks

WHERE = {layout: ranks for layout, (ranks, _, _) in LAYOUTS.items()}
ON_TWO_RANKS = [(each, each if WHERE[each] == 2 else "zero3") for each in LAYOUTS]
"""Each checkpoint, and the layout that goes on from it: its own, or ZeRO of fewer ranks."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    shutil.unpack_archive(DATA / "checkpoints.zip", folder)
    return folder


def stored(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def resume(rank: int, world_size: int, folder: str, pairs: list[tuple[str, str]]) -> list[Any]:
    """Load each checkpoint as a fit does that has nothing left to do; return what is in memory."""
    found = []
    for saved, layout in pairs:
        seed_everything(77, verbose=False)  # not the weights that the checkpoint was trained from
        found.append(content(fit(layout, world_size, Path(folder, saved))))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "pairs"),
    [(1, [(each, "ddp") for each in LAYOUTS]), (2, ON_TWO_RANKS)],
    ids=["one process", "two ranks"],
)
def test_checkpoints_of_an_earlier_version_resume_to_the_bit(checkpoints, num_ranks, pairs):
    ranks = run_ranks(resume, num_ranks, str(checkpoints), pairs)
    for number, (saved, layout) in enumerate(pairs):
        whole = merged([found[number] for found in ranks])
        assert whole == stored(saved), f"{saved} into {layout}"


@pytest.mark.parametrize("saved", LAYOUTS)
def test_checkpoints_of_an_earlier_version_can_be_exported(checkpoints, tmp_path, saved):
    if (checkpoints / saved).is_dir():
        target = tmp_path / "exported.ckpt"
        with redirect_stdout(StringIO()):
            assert run_command(["export", str(checkpoints / saved), "--to", str(target)]) == 0
    else:
        target = checkpoints / saved
    state = torch.load(target, weights_only=True)["state_dict"]
    wanted = stored(saved)
    for name, value in state.items():
        # A tied weight is stored once.
        assert numbers(value) == wanted[name.replace("head.weight", "embedding.weight")], name


def test_a_recording_of_an_earlier_version_can_be_replayed():
    with redirect_stdout(StringIO()) as printed:
        assert run_command(["top", "--once", "--json", "--replay", str(DATA / "recording")]) == 0
    assert summary(json.loads(printed.getvalue())) == stored("recording")
