"""What export writes goes on in plain Lightning, and what import writes goes on in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from boltmesh.cli import run_command
from boltmesh.strategies.checkpoint.optimizer_state import parameter_names
from tests.parity.test_tensor_checkpoints import Run, fits, merged
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET

pytestmark = pytest.mark.ranks

KINDS = ["zero", "pipeline", "tensor2"]


def losses_of(rank: int, world_size: int, kinds: list[str], weights: str) -> list[float]:
    """The validation loss of imported weights in each layout."""
    found: list[float] = []
    for kind in kinds:
        trainer = Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=Run(kind, 1, "").strategy(),
            use_distributed_sampler=False,
            **QUIET,
        )
        module = TinyGPT(ties=True, groups=True, freezes=True)
        (metrics,) = trainer.validate(module, text_data(8, 8), ckpt_path=weights, verbose=False)
        found += metrics.values()
    return found


def test_runs_go_on_in_plain_lightning_and_back(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def convert(verb: str, source: str, target: str, *options: str) -> Path:
        line = [verb, str(tmp_path / source), "--to", str(tmp_path / target), *options]
        assert run_command(line) == 0
        return tmp_path / target

    run_ranks(fits, 2, folder, [Run(each, 1, f"{each}-half") for each in KINDS], timeout_s=110)
    for each in KINDS:
        file = convert("export", f"{each}-half", f"{each}.ckpt")
        check_like_plain(torch.load(file, weights_only=True))
    first = [Run("plain", 2, "whole.ckpt"), Run("plain", 1, "half.ckpt")]
    ended = [Run("plain", 2, f"{each}-end.ckpt", f"{each}.ckpt", seed=77) for each in KINDS]
    reference, _, *others = merged(run_ranks(fits, 1, folder, [*first, *ended], timeout_s=110))

    convert("import", "half.ckpt", "half")
    back = [Run(each, 2, f"{each}-end", "half", seed=77) for each in KINDS]
    others += merged(run_ranks(fits, 2, folder, back, timeout_s=110))
    for number, ended_as in enumerate(others):
        assert ended_as.keys() == reference.keys(), number
        for key, value in ended_as.items():
            near = torch.isclose(value, reference[key], rtol=1e-4, atol=2e-5)
            assert bool(near.all()), f"{number}: {key}"

    # There and back again changes no bit of what was stored, and neither do the weights alone.
    again = convert("export", "half", "again.ckpt")
    same(
        torch.load(tmp_path / "half.ckpt", weights_only=True), torch.load(again, weights_only=True)
    )
    convert("export", "tensor2-half", "weights.safetensors", "--prefix", "")
    weights = convert("import", "weights.safetensors", "of-weights")
    losses, same_losses = run_ranks(losses_of, 2, KINDS, str(weights), timeout_s=110)
    plain = Trainer(accelerator="cpu", devices=1, **QUIET)
    module = TinyGPT.load_from_checkpoint(tmp_path / "tensor2.ckpt", weights_only=True)
    (expected,) = plain.validate(module, text_data(8, 8), verbose=False)
    assert losses == same_losses == pytest.approx([*expected.values()] * len(KINDS), rel=1e-5)


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
