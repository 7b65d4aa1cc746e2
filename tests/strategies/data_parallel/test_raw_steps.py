"""Optimizers that a step calls by themselves, past Lightning, are seen by the next forward pass."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from boltmesh.errors import UnsupportedError
from boltmesh.strategies import DDPStrategy, ZeROStrategy, gathered_parameters
from tests.support.ranks import run_ranks
from tests.support.sharded import whole
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks


class Raw(Stack):
    """Two steps in a batch with looks at the model between, by the optimizer itself."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.automatic_optimization = False
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        for _ in range(2):
            loss = self.loss(batch)
            self.manual_backward(loss)
            with torch.no_grad():  # gathers once more, and nothing frees that
                before = self.loss(batch)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                after = self.loss(batch)
            self.losses += [before.item(), after.item()]


class Temperature(Raw):
    """A loss of the module's own parameter alone, as of the temperature of soft actor-critic."""

    def __init__(self) -> None:
        super().__init__()
        self.log_alpha = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        trained, of_alpha = self.optimizers()  # type: ignore[attr-defined]
        loss = self.loss(batch) * self.log_alpha.exp().detach()
        entropy = -(self.log_alpha * (loss.detach() + 2)).mean()
        for optimizer, each in ((trained, loss), (of_alpha, entropy)):
            optimizer.zero_grad()
            self.manual_backward(each)
            optimizer.step()
        self.losses += [loss.item(), entropy.item()] * 2

    def configure_optimizers(self) -> Any:
        others = [each for each in self.parameters() if each is not self.log_alpha]
        return torch.optim.SGD(others, 0.1), torch.optim.SGD([self.log_alpha], 0.1)


class Scalar(Temperature):
    """The same of a parameter without dimensions, read in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.log_alpha = torch.nn.Parameter(torch.tensor(0.0))

    def on_train_batch_end(self, *_: Any) -> None:
        with gathered_parameters(self) as whole:
            self.losses[-1] = whole["log_alpha"].item()


class ReadsGradients(Raw):
    """Zeroes, adds and scales gradients through the module."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = self.loss(batch)
        self.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        first = [each.grad.clone() for each in self.parameters() if each.grad is not None]
        self.zero_grad()
        self.manual_backward(2 * loss)
        trained = [each for each in self.parameters() if each.grad is not None]
        for each, before in zip(trained, first, strict=True):
            assert each.grad is not None
            each.grad = each.grad + before
            each.grad.mul_(0.3)
        self.optimizers(use_pl_optimizer=False).step()
        self.losses += [loss.item(), len(first)] * 2


class ReadsScalar(ReadsGradients):
    """The same with a parameter without dimensions, such as a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.tensor(1.5))


def fit(rank: int, world_size: int, kind: type[Raw], stage: int, offload: Any) -> Any:
    seed_everything(1)
    module = kind()
    strategy: Any = "auto"
    if stage:
        strategy = ZeROStrategy(stage=stage, telemetry=False, offload_optimizer=offload)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, token_data(12, 4))
    return module.losses, {name: whole(each) for name, each in module.named_parameters()}


class Apart(Raw):
    """Calls ``backward`` past Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


class Averaged(Apart):
    """As Lightning wants it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def warned(rank: int, world_size: int, kind: type[Raw]) -> int:
    """How often rank 0 warns of ranks that train apart."""
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=DDPStrategy(telemetry=False), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(kind(), token_data(12, 4))
    return sum("no gradients and train apart" in str(each.message) for each in found)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "times"), [(Apart, 1), (Averaged, 0)])
def test_a_backward_pass_that_replicas_do_not_see_is_warned_of(kind: type[Raw], times: int) -> None:
    assert run_ranks(warned, 2, kind) == [times, 0]


class Replaces(Raw):
    """Computes with other tensors in the places of a block's parameters."""

    def loss(self, batch: Any) -> torch.Tensor:
        block = self.blocks[1]
        instead = {name: torch.zeros(each.shape) for name, each in block.named_parameters()}
        hidden = torch.func.functional_call(block, instead, (self.embedding(batch[0]),))
        return self.head(hidden).square().mean()


def refusal(rank: int, world_size: int, stage: int) -> str:
    with pytest.raises(UnsupportedError) as caught:
        fit(rank, world_size, Replaces, stage, None)
    return str(caught.value)


@pytest.mark.full
def test_parameters_in_the_places_of_sharded_ones_are_refused() -> None:
    for texts in run_ranks(in_turn, 2, refusal, [(1,), (3,)]):
        for text in texts:
            assert text.startswith("'blocks.1.norm.weight' was replaced by another tensor")


@pytest.mark.sample("Raw", "ReadsScalar")
@pytest.mark.parametrize("kind", [Raw, Temperature, Scalar, ReadsGradients, ReadsScalar])
def test_a_step_is_seen_by_what_follows_it(kind: type[Raw]) -> None:
    ((losses, expected),) = run_ranks(fit, 1, kind, 0, None)
    assert len(losses) == 12
    assert len(set(losses)) > 3, "a step changes something"
    calls: list[tuple[Any, ...]] = [(kind, 1, None), (kind, 2, None), (kind, 3, None)]
    if kind not in {Scalar, ReadsScalar}:
        calls.append((kind, 3, "cpu"))
    for runs in run_ranks(in_turn, 2, fit, calls):
        for seen, found in runs:
            assert seen == pytest.approx(losses, rel=1e-5)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
