"""Parameters that have no rows to be shared out."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor, nn

from tests.support.ranks import run_ranks
from tests.support.shard_runs import trainer, whole_parameters
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks


def fit_scalars(rank: int, world_size: int, folder: Any) -> Any:
    """Train, save in the middle of an accumulation window, load into another stage."""
    seed_everything(1)
    path = folder / "saved"
    found = []

    class Saves(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, at: int
        ) -> None:
            if at == 2:
                trainer.save_checkpoint(path)
                found.append(float(whole_parameters(module)["temperature"]))

    run = trainer(world_size, 1, max_steps=2, accumulate_grad_batches=2, callbacks=[Saves()])
    run.fit(Stack(has_scalar=True), token_data(16, 2))
    module = Stack(has_scalar=True)
    trainer(world_size, 3).validate(module, token_data(8, 2), ckpt_path=path, verbose=False)
    found.append(float(whole_parameters(module)["temperature"]))
    return found


def resume_with_scalar(rank: int, world_size: int, folder: Any) -> Any:
    """Save in the middle of a run, and go on from there in another stage and offloaded."""
    found = []

    class Saves(Callback):
        def __init__(self, path: Any, batch: int) -> None:
            self.path, self.batch = path, batch

        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, at: int
        ) -> None:
            if at == self.batch:
                trainer.save_checkpoint(self.path)

    offload = {"offload_optimizer": "cpu"}
    runs: list[Any] = [
        (3, {}, None, "plain"),
        (2, {}, "plain", None),
        (3, {**offload, "offload_parameters": "cpu"}, "plain", "offloaded"),
        (1, offload, "offloaded", None),
    ]
    for stage, options, path, saved in runs:
        seed_everything(1)
        module = Unfused(has_scalar=True)
        callbacks = [Saves(folder / saved, 2 if path else 1)] if saved else []
        run = trainer(world_size, stage, options=options, max_steps=4, callbacks=callbacks)
        run.fit(module, token_data(16, 2), ckpt_path=path and folder / path)
        found.append(whole_parameters(module))
    return found


class Unfused(Stack):
    """Steps by the implementation that looks at one parameter after the other."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False, fused=False)


@pytest.mark.full
def test_a_run_with_a_scalar_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    for at_once, *resumed in run_ranks(resume_with_scalar, 2, tmp_path):
        assert len(resumed) == 3
        for each in resumed:
            torch.testing.assert_close(each, at_once, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_scalar_is_saved_in_the_middle_of_a_window_and_loaded(tmp_path: Any) -> None:
    for saved, loaded in run_ranks(fit_scalars, 2, tmp_path):
        assert saved == loaded != 1.5


class Registers(Stack):
    """Has room for tokens in front of each text, of which there are none."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.tokens = nn.Parameter(torch.zeros(0, 7))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = torch.cat([self.tokens.expand(len(x), 0, 7), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def fit_registers(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    seed_everything(1)
    module = Registers()
    run = trainer(world_size, stage, max_epochs=1, accumulate_grad_batches=2 // world_size)
    run.fit(module, token_data(16, 4))
    return whole_parameters(module)


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_without_elements_is_no_obstacle(stage: int) -> None:
    (wanted,) = run_ranks(fit_registers, 1, stage)
    for found in run_ranks(fit_registers, 2, stage):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
