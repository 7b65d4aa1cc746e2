"""What steps and hooks ask for beside their layers is there in a pipeline, or refused by name."""

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.nn import functional

from boltmesh.errors import BoltMeshError
from boltmesh.strategies import gathered_parameters
from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import run_ranks
from tests.support.stack import LENGTH, VOCABULARY, Stack, token_data

pytestmark = pytest.mark.ranks


class LogsRates(Stack):
    """Asks for optimizers and schedules in its step, which are made after the model is divided."""

    def __init__(self) -> None:
        super().__init__(depth=4, groups=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        self.log("beta", optimizer.param_groups[0]["betas"][0])
        self.log("rate", self.trainer.optimizers[0].param_groups[1]["lr"])
        self.log("scheduled", schedule.get_last_lr()[1])
        return super().training_step(batch, batch_idx)


class Transcribes(Stack):
    """A loss over alignments, which cannot be computed where values have no data."""

    def __init__(self) -> None:
        super().__init__(depth=4)

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        scores = self(tokens).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(tokens),), LENGTH)
        return functional.ctc_loss(
            scores, targets[:, :2].clamp(min=1), lengths, 1 + targets[:, 0] % 2
        )


class AddsLater(Stack):
    """Trains on what the first stage gives, from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(depth=4, optimizer="sgd")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        first = x = self.blocks[0](self.embedding(tokens))
        for block in self.blocks[1:]:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if self.current_epoch > 0:
            loss = loss + first.square().mean()
        self.log("train_loss", loss)
        return loss


class Samples(Stack):
    """Calls itself in a hook, as who logs samples does."""

    def __init__(self, *, gathers: bool) -> None:
        super().__init__(depth=4)
        self.gathers = gathers

    def on_validation_epoch_end(self) -> None:
        tokens = torch.arange(LENGTH)[None] % VOCABULARY
        if self.gathers and self.trainer.world_size > 1:
            with gathered_parameters(self):
                self.log("sample", self(tokens).sum())
        else:
            self.log("sample", self(tokens).sum())


class FailsAtOnce(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise ValueError("this step needs a licence")


def fit(rank: int, world_size: int) -> list[dict[str, float]]:
    told = []
    for kind in (LogsRates, Transcribes, AddsLater, lambda: Samples(gathers=True)):
        seed_everything(1, verbose=False)
        strategy = pipeline() if world_size > 1 else "auto"
        trainer = quiet_trainer(world_size, strategy, max_epochs=2)
        trainer.fit(kind(), token_data(22, 8), token_data(9, 8))
        told.append({key: float(value) for key, value in trainer.callback_metrics.items()})
        told[-1].pop("boltmesh/bubble_ratio", None)
    return told


@pytest.mark.full
def test_rates_alignments_and_samples_are_those_of_one_process() -> None:
    (wanted,) = run_ranks(fit, 1)
    assert {"beta", "rate", "scheduled"} < wanted[0].keys()
    for told in run_ranks(fit, 2):
        for found, expected in zip(told, wanted, strict=True):
            assert found == pytest.approx(expected, rel=1e-4)


def refused(rank: int, world_size: int) -> list[str]:
    def attempt(module: Stack) -> str:
        try:
            quiet_trainer(2, pipeline()).fit(module, token_data(22, 8), token_data(9, 8))
        except (BoltMeshError, ValueError) as error:
            return str(error)
        return "nothing"

    return [attempt(Samples(gathers=False)), attempt(FailsAtOnce(depth=4))]


@pytest.mark.full
def test_layers_that_a_hook_calls_and_a_step_that_fails_at_once_are_told_on_all_ranks() -> None:
    for called, failed in run_ranks(refused, 2):
        assert "is called outside of the steps that a pipeline runs" in called
        assert "this step needs a licence" in failed
