"""``DetectNonFinite``: the first module with a NaN or an infinity is named with rank and step."""

from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from boltmesh.strategies import (
    DDPStrategy,
    DetectNonFinite,
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import RankFailure, run_ranks

MADE: dict[str, Any] = {
    "ddp": DDPStrategy,
    "zero3": ZeROStrategy,
    "recomputed": lambda **more: DDPStrategy(activation_checkpointing="selective", **more),
    "tensor": TensorParallelStrategy,
    "pipeline": lambda **more: PipelineParallelStrategy(stages=2, microbatches=2, **more),
    "interleaved": lambda **more: PipelineParallelStrategy(
        stages=2, microbatches=2, schedule="interleaved_1f1b", **more
    ),
    "3d": lambda **more: Parallel3DStrategy(pipeline=2, tensor=2, microbatches=2, **more),
}


class Fragile(nn.Module):
    """A layer whose output has one bad value from a step on, on some ranks."""

    def __init__(self, layer: nn.Module, value: float, step: int, rank: int | None) -> None:
        super().__init__()
        self.layer = layer
        self.value, self.step, self.rank = value, step, rank
        self.at = lambda: (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        step, rank = self.at()
        if step >= self.step and self.rank in {None, rank}:
            out = out + torch.tensor([self.value, *[0.0] * (out.shape[-1] - 1)])
        return out


def fit(rank: int, world_size: int, kind: str, value: float, on: int | None) -> int:
    seed_everything(1, verbose=False)
    model = TinyGPT(optimizer="sgd")
    first, last = cast("Any", model.blocks)
    first.down = Fragile(first.down, value, 99, on)
    last.down = fragile = Fragile(last.down, value, 2, on)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=MADE[kind](telemetry=False), callbacks=[DetectNonFinite()],
    )  # fmt: skip
    fragile.at = lambda: (trainer.global_step, trainer.global_rank)
    trainer.fit(model, text_data(48, 4))
    return trainer.global_step


@pytest.mark.sample("zero3-inf-1-1")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "value", "on", "rank"),
    [
        ("ddp", float("nan"), 1, 1),
        ("recomputed", float("inf"), None, 0),
        ("zero3", float("inf"), 1, 1),
        ("tensor", float("nan"), None, 0),
        ("pipeline", float("nan"), None, 1),
        ("interleaved", float("inf"), None, 0),
        ("3d", float("inf"), None, 2),
    ],
)
def test_the_first_module_is_named_with_its_rank_and_step(
    kind: str, value: float, on: int | None, rank: int
) -> None:
    said = (
        rf"in step 3 \(batch 2 of the epoch\) the output of blocks\.1\.down is not finite on rank "
        rf"{rank}; all that came before it was\. Resume"
    )
    with pytest.raises(RankFailure, match=said):
        run_ranks(fit, 4 if kind == "3d" else 2, kind, value, on)


@pytest.mark.full
@pytest.mark.ranks
def test_masks_of_negative_infinity_and_finite_steps_pass() -> None:
    assert run_ranks(fit, 2, "ddp", 0.0, None) == [4, 4]
    assert run_ranks(fit, 2, "pipeline", 0.0, None) == [4, 4]
    detector = DetectNonFinite()
    detector._note("mask", torch.tensor([0.0, float("-inf")]))
    assert [bool(flag) for _, flag in detector._seen] == [True]


class Explodes(TinyGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss / (batch_idx < 1)


def test_a_loss_and_a_batch_that_are_not_finite_are_named() -> None:
    def trained(model: TinyGPT, data: Any) -> str:
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=4, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[DetectNonFinite()],
            log_every_n_steps=1, num_sanity_val_steps=0,
        )  # fmt: skip
        with pytest.raises(RuntimeError) as failed:
            trainer.fit(model, data, data)
        assert not any(each._forward_hooks for each in model.modules())
        return str(failed.value)

    assert trained(Explodes(), text_data(48, 4)).startswith(
        "in step 2 (batch 1 of the epoch) the loss is not finite on rank 0;"
    )
