"""Loss scaling under fp16: one stage's overflow is everybody's, and the scale stays one."""

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks

INITIAL = 2.0**10


class FrozenStart(Stack):
    """Its first stage has nothing to train, and its last one has."""

    def __init__(self) -> None:
        super().__init__(depth=4, optimizer="sgd")
        for each in (self.embedding, *self.blocks[:2]):
            each.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Overflows(Callback):
    """Makes a gradient infinite in one step, wherever the parameter is held."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gradient = pl_module.get_parameter(self.name).grad
        if trainer.global_step == 1 and gradient is not None:
            gradient.view(-1)[0] = float("inf")


def fit(rank: int, world_size: int, overflowing: str, freezes: bool) -> Any:
    """Train in fp16; return this rank's parameters after each step, and the scale at the end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL)
    strategy: Any = DDPStrategy(telemetry=False)
    if world_size > 1:
        strategy = PipelineParallelStrategy(
            telemetry=False, microbatches=4, split=["blocks.2"], schedule="zero_bubble"
        )
    seed_everything(1, verbose=False)
    module = FrozenStart() if freezes else Stack(depth=4, optimizer="sgd")
    values: list[dict[str, Tensor]] = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            named = pl_module.named_parameters()
            held = world_size == 1 or strategy.holds
            values.append(
                {name: each.detach().clone() for name, each in named if held is True or held(name)}
            )

    Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, gradient_clip_val=1.0,
        callbacks=[Overflows(overflowing), Notes()],
        plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler)],
    ).fit(module, token_data(32, 8))  # fmt: skip
    assert "_unscale_grads_" not in vars(scaler)
    return values, scaler.get_scale()


@pytest.mark.sample("embedding.weight-False")
@pytest.mark.parametrize(
    ("overflowing", "freezes"),
    [("embedding.weight", False), ("head.weight", False), ("head.weight", True)],
)
def test_an_overflow_on_one_stage_is_one_of_all(overflowing: str, freezes: bool) -> None:
    ((alone, alone_scale),) = run_ranks(fit, 1, overflowing, freezes)
    ranks = run_ranks(fit, 2, overflowing, freezes)
    assert [scale for _, scale in ranks] == [INITIAL / 2] * 2
    assert alone_scale == INITIAL / 2
    names: set[str] = set()
    for values, _ in ranks:
        trained = [name for name in values[0] if not torch.equal(values[0][name], values[-1][name])]
        names |= values[0].keys()
        for name in trained:
            moved = [
                not torch.equal(one[name], two[name]) for one, two in itertools.pairwise(values)
            ]
            assert moved == [False, True, True], name
        for mine, reference in zip(values, alone, strict=True):
            for name, value in mine.items():
                # Microbatches are rounded to fp16 apart from each other.
                torch.testing.assert_close(value, reference[name], rtol=2e-3, atol=2e-3)
    assert names == alone[0].keys()
    assert sum(bool(values[0]) for values, _ in ranks) == 2


class Steep(Stack):
    """Gradients that fit into fp16 under the scale, and would not if four times as large."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 4.0


def fit_near_the_limit(rank: int, world_size: int, scale: float) -> float:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000)
    strategy: Any = DDPStrategy(telemetry=False)
    if world_size > 1:
        strategy = PipelineParallelStrategy(telemetry=False, microbatches=8, schedule="gpipe")
    seed_everything(1, verbose=False)
    Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler)],
        use_distributed_sampler=False,
    ).fit(Steep(depth=4, optimizer="sgd"), token_data(48, 16))  # fmt: skip
    return scaler.get_scale()


def largest_scale(rank: int, world_size: int) -> float:
    """Return the largest power of two under which one process skips no step."""
    scales = (2.0**power for power in range(20, 8, -1))
    return next(each for each in scales if fit_near_the_limit(0, 1, each) == each)


@pytest.mark.full
def test_microbatches_overflow_no_sooner_than_the_whole_batch() -> None:
    """Their own means have gradients eight times those of the batch's mean."""
    (largest,) = run_ranks(largest_scale, 1)
    assert run_ranks(fit_near_the_limit, 2, largest) == [largest] * 2
