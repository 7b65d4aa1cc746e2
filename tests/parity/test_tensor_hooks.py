"""Hooks that see activations between divided layers are named; others see what one process sees."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltmesh.strategies import TensorParallelStrategy
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        loss: Tensor = self.head(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Monitor(Callback):
    """Means of activations by module, as monitors of dead units have them."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.means: dict[str, list[float]] = {name: [] for name in names}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name in self.names:
            pl_module.get_submodule(name).register_forward_hook(self.noting(name))

    def noting(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            self.means[name].append(float((output > 0).float().mean()))

        return note


def monitor(
    rank: int, world_size: int, names: list[str], options: dict[str, Any]
) -> tuple[dict[str, list[float]], list[str]]:
    seed_everything(1, verbose=False)
    batches: Any = DataLoader([torch.randn(3, 4, WIDTH) for _ in range(2)], batch_size=None)  # type: ignore[arg-type]
    callback = Monitor(names)
    strategy: Any = TensorParallelStrategy(telemetry=False, **options) if world_size > 1 else "auto"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[callback],
        ).fit(Stack(), batches)  # fmt: skip
    texts = [str(each.message) for each in caught]
    return callback.means, [each for each in texts if "sees this rank's part" in each]


PARTS = {
    "channels": (["blocks.0.up", "blocks.1.act"], {}),
    "tokens": (["blocks.0", "blocks.1.norm"], {"sequence_parallel": True}),
}

WHOLE = {
    "channels": (["blocks.0.norm", "blocks.1.down", "blocks.1", "head"], {}),
    "tokens": (["blocks.1", "head"], {"sequence_parallel": True}),
    "by the plan": (["blocks.1.act"], {"plan": {"blocks.*.up.*": "whole"}}),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_hook_on_a_part_of_an_activation_is_named(case: str) -> None:
    names, options = PARTS[case]
    for _, warned in run_ranks(monitor, 2, names, options):
        assert len(warned) == 1
        assert f"Monitor.noting.<locals>.note on '{names[0]}' and 1 more sees" in warned[0]


@pytest.mark.parametrize("case", WHOLE)
def test_other_hooks_see_whole_activations(case: str) -> None:
    names, options = WHOLE[case]
    wanted, _ = run_ranks(monitor, 1, names, {})[0]
    for means, warned in run_ranks(monitor, 2, names, options):
        assert not warned
        for name in names:
            assert means[name] == pytest.approx(wanted[name])
