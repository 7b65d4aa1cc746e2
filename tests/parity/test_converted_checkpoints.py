"""What export writes goes on in plain Lightning, and what import writes goes on in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from boltmesh.cli import run_command
from boltmesh.strategies import StartingWeights
from boltmesh.strategies.checkpoint.optimizer_state import parameter_names
from tests.support.continued_runs import Run, different, run_all
from tests.support.gpts import TinyGPT, text_data
from tests.support.layouts import ALL_LAYOUTS, PLAIN
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET

pytestmark = pytest.mark.ranks

KINDS = {"zero": "ZeRO-3, 2", "pipeline": "1f1b, 2", "tensor": "tensor, 2"}
OFFLOADED = "ZeRO-3 on the CPU, 2"


def losses_of(rank: int, world_size: int, layouts: list[str], weights: str) -> list[list[float]]:
    """In each layout, the loss of imported weights, and of what three steps make of them."""
    return [losses(each, world_size, weights) for each in layouts]


def losses(layout: str, world_size: int, weights: str) -> list[float]:
    found: list[float] = []
    for steps in (0, 3):
        seed_everything(77, verbose=False)  # another model than the one that was stored
        module = TinyGPT(ties=True, groups=True, freezes=True)
        trainer = Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=ALL_LAYOUTS[layout].strategy(Path(weights).parent),
            use_distributed_sampler=False,
            max_steps=steps,
            callbacks=[StartingWeights(weights)] if steps else [],
            **QUIET,
        )
        if steps:
            trainer.fit(module, text_data(24, 8), text_data(8, 8))
        path = None if steps else weights
        (metrics,) = trainer.validate(module, text_data(8, 8), ckpt_path=path, verbose=False)
        found += metrics.values()
    return found


@pytest.mark.full
def test_runs_go_on_in_plain_lightning_and_back(tmp_path: Path) -> None:
    def convert(verb: str, source: str, target: str, *options: str) -> Path:
        line = [verb, str(tmp_path / source), "--to", str(tmp_path / target), *options]
        assert run_command(line) == 0
        return tmp_path / target

    run_all(tmp_path, "gpt", [Run(layout, 1, f"{each}-half") for each, layout in KINDS.items()])
    for each in KINDS:
        file = convert("export", f"{each}-half", f"{each}.ckpt")
        check_like_plain(torch.load(file, weights_only=True))
    alone = [Run(PLAIN, 2, "whole.ckpt"), Run(PLAIN, 1, "half.ckpt")]
    alone += [Run(PLAIN, 2, f"{each}-end.ckpt", f"{each}.ckpt") for each in KINDS]
    ends = run_all(tmp_path, "gpt", alone)

    convert("import", "half.ckpt", "half")
    back = [Run(layout, 2, f"{each}-end", "half") for each, layout in KINDS.items()]
    ends |= run_all(tmp_path, "gpt", back)
    for target, end in ends.items():
        if target != "half.ckpt":
            assert different(end, ends["whole.ckpt"]) == [], target

    # There and back again changes no bit of what was stored, and neither do the weights alone.
    again = convert("export", "half", "again.ckpt")
    same(
        torch.load(tmp_path / "half.ckpt", weights_only=True), torch.load(again, weights_only=True)
    )
    convert("export", "tensor-half", "weights.safetensors", "--prefix", "")
    weights = convert("import", "weights.safetensors", "of-weights")
    found = run_ranks(losses_of, 2, [*KINDS.values(), OFFLOADED], str(weights))
    found += run_ranks(losses_of, 1, ["DDP, 1"], str(weights))
    expected = plain_losses(tmp_path / "tensor.ckpt")
    assert expected[1] != pytest.approx(expected[0], rel=1e-2)
    for each in (each for rank in found for each in rank):
        assert each == pytest.approx(expected, rel=1e-4)


def plain_losses(path: Path) -> list[float]:
    """The same of plain Lightning in this process."""
    module = TinyGPT.load_from_checkpoint(path, weights_only=True)
    found: list[float] = []
    for steps in (0, 3):
        trainer = Trainer(accelerator="cpu", devices=1, max_steps=steps, **QUIET)
        if steps:
            trainer.fit(module, text_data(24, 8), text_data(8, 8))
        (metrics,) = trainer.validate(module, text_data(8, 8), verbose=False)
        found += metrics.values()
    return found


def check_like_plain(checkpoint: dict[str, Any]) -> None:
    """The numbers of parameters are those of an optimizer of one process."""
    module = TinyGPT(ties=True, groups=True, freezes=True)
    ((optimizer,), _) = module.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    shapes = dict(module.named_parameters())
    for name in (each for group in parameter_names(module, optimizer) for each in group):
        assert optimizer.state[shapes[name]]["exp_avg"].shape == shapes[name].shape, name


def same(one: Any, other: Any, where: str = "checkpoint") -> None:
    """Two contents are equal to the bit."""
    assert type(one) is type(other) or isinstance(one, dict), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, each in one.items():
            same(each, other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, each in enumerate(one):
            same(each, other[number], f"{where}.{number}")
    else:
        assert one == other, where
