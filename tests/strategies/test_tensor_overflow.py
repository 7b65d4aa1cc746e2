"""Under fp16 the ranks of a tensor group skip steps together; norms count every element once."""

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from boltmesh.strategies import TensorParallelStrategy
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Overflows(Callback):
    """Makes a gradient infinite in one step, of what one tensor rank has a part of."""

    reads_gradients = False

    def __init__(self) -> None:
        self.before: list[Tensor] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step == 1 and strategy.coordinates["tensor"] == 1:
            gradient = pl_module.get_parameter("blocks.0.up.weight").grad
            assert gradient is not None
            gradient[0] = float("inf")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        norm = pl_module.get_parameter("blocks.0.first.weight")  # whole on every rank
        self.before.append(norm.detach().clone())


class Ones(Callback):
    """Makes every gradient 1, whose norm says how many elements were counted."""

    reads_gradients = False

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for each in pl_module.parameters():
            each.grad.fill_(1.0)
        self.norms.append(trainer.strategy.gradient_norm(optimizer))
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1e9)))


def trainer_of(world_size: int, callback: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=world_size, max_steps=4, logger=False, callbacks=[callback],
        strategy=TensorParallelStrategy(telemetry=False, size=2), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def fit(rank: int, world_size: int) -> tuple[list[bool], float, list[Tensor], list[float], int]:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    seed_everything(1, verbose=False)
    overflows = Overflows()
    trainer = trainer_of(world_size, overflows, plugins=[plugin], gradient_clip_val=1.0)
    trainer.fit(TinyGPT(optimizer="sgd"), text_data(32, 4))
    moved = [not torch.equal(*pair) for pair in itertools.pairwise(overflows.before)]
    ones = Ones()
    module = TinyGPT(ties=True, vocabulary=27, optimizer="sgd")
    elements = sum(each.numel() for each in module.parameters())
    trainer_of(world_size, ones).fit(module, text_data(32, 4))
    return moved, scaler.get_scale(), overflows.before, ones.norms, elements


@pytest.mark.full
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_norms_count_each_element_once() -> None:
    ranks = run_ranks(fit, 4)
    for moved, scale, values, norms, elements in ranks:
        assert moved == [False, True, True]
        assert scale == 64.0
        assert all(bool(each.isfinite().all()) for each in values)
        assert all(map(torch.equal, values, ranks[0][2]))
        assert len(norms) == 8
        assert norms == pytest.approx([elements**0.5] * 8, rel=1e-6)
