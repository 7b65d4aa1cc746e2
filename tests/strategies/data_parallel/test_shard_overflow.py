"""An overflow under fp16 is one for all ranks."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch.distributed.tensor import DTensor

from tests.support.ranks import run_ranks
from tests.support.shard_runs import STAGES, trainer, whole_parameters
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks


class Overflows(Callback):
    """Makes a gradient infinite on one rank, in one step."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 1 and trainer.global_rank == trainer.world_size - 1:
            gradient = pl_module.head.weight.grad
            assert isinstance(gradient, DTensor)
            gradient.to_local()[0] = float("inf")


def fit_in_fp16(rank: int, world_size: int, stage: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    seed_everything(1)
    module = Stack(optimizer="sgd")
    values = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            values.append(whole_parameters(pl_module))

    run = trainer(
        world_size, stage, max_steps=4, plugins=[plugin], gradient_clip_val=1.0,
        callbacks=[Overflows(), Notes()],
    )  # fmt: skip
    run.fit(module, token_data(32, 4))
    moved = [
        any(not torch.equal(before[name], after[name]) for name in before)
        for before, after in itertools.pairwise(values)
    ]
    is_finite = all(bool(each.isfinite().all()) for each in values[-1].values())
    return moved, is_finite, scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for stages in run_ranks(in_turn, 2, fit_in_fp16, STAGES):
        assert stages == [([False, True, True], True, 64.0)] * 3


class ScalarFirst(Stack):
    """Its optimizer looks first, or last, at a parameter that all ranks hold whole."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__(has_scalar=True)
        self.is_first = is_first

    def configure_optimizers(self) -> Any:
        ordered = sorted(self.parameters(), key=lambda each: (each.dim() == 0) != self.is_first)
        return torch.optim.SGD(ordered, lr=0.1)


def fit_scalar_in_fp16(rank: int, world_size: int, *, is_first: bool) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    seed_everything(1)
    module = ScalarFirst(is_first=is_first)
    callbacks = [Overflows()]
    run = trainer(world_size, 3, max_steps=4, plugins=[plugin], callbacks=callbacks)
    run.fit(module, token_data(32, 8 // world_size))
    assert "_unscale_grads_" not in vars(scaler)
    return whole_parameters(module), scaler.get_scale()


@pytest.mark.full
@pytest.mark.parametrize("is_first", [True, False])
def test_an_overflow_is_agreed_on_wherever_a_whole_parameter_stands(is_first: bool) -> None:
    ranks = run_ranks(partial(fit_scalar_in_fp16, is_first=is_first), 2)
    ((alone, alone_scale),) = run_ranks(partial(fit_scalar_in_fp16, is_first=is_first), 1)
    for values, scale in ranks:
        assert scale == alone_scale == 64.0
        for name, value in values.items():
            # Halves of a batch are rounded to fp16 apart from each other.
            torch.testing.assert_close(value, alone[name], rtol=2e-3, atol=2e-3)
