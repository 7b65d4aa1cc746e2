"""Gradients of a finished step make room for what the next one gathers, and nobody misses them."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from boltmesh.strategies import ZeROStrategy
from tests.support.ranks import run_ranks
from tests.support.sharded import whole
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks


class Looks(Stack):
    """Counts its optimizer's gradients where a step could look at them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[tuple[int, int]] = []

    def count(self) -> int:
        optimizer = self.trainer.optimizers[0]
        return sum(p.grad is not None for g in optimizer.param_groups for p in g["params"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        through_module = sum(each.grad is not None for each in self.blocks.parameters())
        loss = super().training_step(batch, batch_idx)
        self.seen.append((through_module, self.count()))
        return loss


class OwnZero(Looks):
    """Zeroes by itself."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


class Keeper(torch.optim.AdamW):
    """Its own ``zero_grad`` keeps everything."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


class Keeps(Looks):
    """Adds gradients of all steps up."""

    def configure_optimizers(self) -> Any:
        return Keeper(self.parameters(), lr=0.01)


class ReadsGradients(Callback):
    """Looks at gradients before they are zeroed."""

    def on_before_zero_grad(self, *_: Any) -> None:
        pass


def fit(
    rank: int, world_size: int, kind: type[Looks], stage: int, accumulate: int, watched: bool
) -> list[tuple[int, int]]:
    seed_everything(1)
    module = kind()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=ZeROStrategy(stage=stage, telemetry=False),
        max_steps=2, accumulate_grad_batches=accumulate, logger=False, enable_checkpointing=False,
        callbacks=[ReadsGradients()] if watched else [],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, token_data(32, 2))
    return module.seen


NUM_PARAMETERS = len(list(Stack().parameters()))
OF_BLOCKS = len(list(Stack().blocks.parameters()))


@pytest.mark.full
def test_only_the_first_forward_pass_of_a_step_frees_gradients() -> None:
    calls = [(Looks, 1, 1, False), (Looks, 2, 2, False), (Looks, 3, 1, False)]
    for once, twice, freed in run_ranks(in_turn, 2, fit, calls):
        # What the module shows before the first forward pass of a step is not there behind it.
        assert once == [(0, 0), (OF_BLOCKS, 0)]
        seen = OF_BLOCKS, NUM_PARAMETERS
        assert twice == [(0, 0), seen, (OF_BLOCKS, 0), seen]
        assert freed[1] == (OF_BLOCKS, NUM_PARAMETERS)


@pytest.mark.full
def test_gradients_stay_for_who_zeroes_them_or_looks_at_them() -> None:
    calls = [(OwnZero, 1, 1, False), (Keeps, 2, 1, False), (Looks, 1, 1, True)]
    for runs in run_ranks(in_turn, 2, fit, calls):
        for seen in runs:
            assert seen[1] == (OF_BLOCKS, NUM_PARAMETERS)


class Recomputed(Stack):
    """Its blocks run again in the backward pass, when other blocks have gradients already."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(checkpoint(self.blocks[0], x, use_reentrant=False)))
        return logits


class EndsEarly(Stack):
    """Ends each epoch in the midst of an accumulation window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def trained(
    rank: int, world_size: int, stage: int, kind: type[Stack] = Recomputed
) -> dict[str, Tensor]:
    seed_everything(1)
    module = kind(optimizer="sgd")
    strategy: Any = ZeROStrategy(stage=stage, telemetry=False) if stage else "auto"
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=3,
        accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, token_data(12, 2))
    return {name: whole(each) for name, each in module.named_parameters()}


@pytest.mark.full
def test_blocks_that_run_again_in_the_backward_pass_keep_their_gradients() -> None:
    expected = run_ranks(trained, 1, 0)[0]
    for stages in run_ranks(in_turn, 2, trained, [(1,), (2,)]):
        for found in stages:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_window_that_is_cut_short_leaves_nothing_to_the_next() -> None:
    expected = run_ranks(trained, 1, 0, EndsEarly)[0]
    for stages in run_ranks(in_turn, 2, trained, [(1, EndsEarly), (2, EndsEarly)]):
        for found in stages:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
