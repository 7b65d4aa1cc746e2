"""Numbers that a hook makes of gradients are those of the whole model, or refused."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from boltmesh.errors import UnsupportedError
from boltmesh.strategies import PipelineParallelStrategy, TensorParallelStrategy, ZeROStrategy
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks


class Measured(Stack):
    """Keeps the norm of its gradients, made by hand as many published modules do."""

    def __init__(self) -> None:
        super().__init__(depth=2, width=8, hidden=16, optimizer="sgd")
        self.seen: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = 0.0
        for parameter in self.parameters():
            if parameter.grad is not None:
                total += parameter.grad.detach().data.norm(2).item() ** 2
        self.seen.append(math.sqrt(total))


class Finite(Measured):
    """Leaves a step out whose gradients are not finite."""

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def on_after_backward(self) -> None:
        gradients = [each.grad for each in self.parameters() if each.grad is not None]
        is_finite = all(bool(torch.isfinite(each).all()) for each in gradients)
        if not is_finite:
            self.zero_grad()
        self.seen.append(max(float(each.abs().max()) for each in gradients))


class Scaled(Measured):
    """Scales each gradient by its own norm."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.norm() + 1)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        self.seen.append(float(norm))


class ByHand(Measured):
    """Optimises by hand, clips by torch's function and keeps the norm that this gives."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.look()
        optimizer.step()

    def look(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        self.seen.append(norm.item())


class BesideIt(ByHand):
    """Clips a module that is no part of it, and that every rank has whole."""

    def look(self) -> None:
        other = torch.nn.Linear(3, 2)
        for parameter in other.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)))


class Sums(ByHand):
    """Makes the norm itself."""

    def look(self) -> None:
        squares = [each.grad.norm() ** 2 for each in self.parameters() if each.grad is not None]
        self.seen.append(float(sum(squares)))


class Logs(ByHand):
    """Logs the norm of one gradient from the step."""

    def look(self) -> None:
        weight = next(self.parameters())
        assert weight.grad is not None
        self.log("norm", weight.grad.norm())

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["norm"]))


class Reads(ByHand):
    """Reads the norm of one gradient in the step."""

    def look(self) -> None:
        weight = next(self.parameters())
        assert weight.grad is not None
        self.seen.append(weight.grad.norm().item())


class WeightNorm(Measured):
    """Reads the norm of a weight behind the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(next(self.parameters()).norm().item())


class Measures(Callback):
    """The norm of all gradients in one tensor, of which nothing is read."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        gradients = [each.grad for each in module.parameters() if each.grad is not None]
        trainer.norm = torch.stack([each.norm() for each in gradients]).norm()


STRATEGIES: dict[str, Any] = {
    "one": lambda: "auto",
    "zero1": lambda: ZeROStrategy(stage=1, telemetry=False),
    "zero3_cpu": lambda: ZeROStrategy(stage=3, offload_optimizer="cpu", telemetry=False),
    "pipeline": lambda: PipelineParallelStrategy(telemetry=False),
    "tensor": lambda: TensorParallelStrategy(telemetry=False),
}


def fit(
    rank: int, world_size: int, kind: type[Measured], strategy: str, callbacks: list[Callback]
) -> Any:
    seed_everything(1)
    module = kind()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=STRATEGIES[strategy](), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, callbacks=callbacks,
    )  # fmt: skip
    try:
        trainer.fit(module, token_data(8, 4))
    except UnsupportedError as error:
        return str(error)
    return module.seen


@pytest.mark.sample("Measured", "Scaled", "ByHand")
@pytest.mark.parametrize("kind", [Measured, Finite, Scaled, ByHand, BesideIt, Sums, Logs])
def test_numbers_made_of_shards_are_those_of_one_process(kind: type[Measured]) -> None:
    (expected,) = run_ranks(fit, 1, kind, "one", [])
    calls: list[tuple[Any, ...]] = [(kind, strategy, []) for strategy in ("zero1", "zero3_cpu")]
    if kind is Scaled:
        calls.append((kind, "pipeline", []))
    if kind in {ByHand, BesideIt}:
        calls.append((kind, "tensor", []))
    for runs in run_ranks(in_turn, 2, fit, calls):
        for seen in runs:
            assert seen == pytest.approx(expected, rel=1e-5)


def test_numbers_made_of_a_rank_s_own_gradients_are_refused() -> None:
    calls: list[tuple[Any, ...]] = [
        (kind, strategy, callbacks)
        for strategy in ("pipeline", "tensor")
        for kind, callbacks in ((Measured, []), (Finite, []), (Stacked, [Measures()]))
    ]
    calls.append((Scaled, "tensor", []))
    for runs in run_ranks(in_turn, 2, fit, calls):
        for (_, strategy, _), text in zip(calls, runs, strict=True):
            has = "those of its stages alone" if strategy == "pipeline" else "a part of these"
            assert f"makes a number of gradients, and a rank has {has}" in text
            assert "test_gradient_reads.py:" in text


def test_numbers_that_are_read_elsewhere_are_refused_where_they_are_of_a_shard() -> None:
    calls: list[tuple[Any, ...]] = [
        (kind, strategy, []) for strategy in ("zero1", "zero3_cpu") for kind in (Reads, WeightNorm)
    ]
    for runs in run_ranks(in_turn, 2, fit, calls):
        for text in runs:
            assert "of which each rank has a shard" in text


@pytest.mark.parametrize("kind", [Reads, WeightNorm])
def test_a_single_rank_has_all_numbers(kind: type[Measured]) -> None:
    (expected,) = run_ranks(fit, 1, kind, "one", [])
    for strategy in ("zero1", "zero3_cpu"):
        assert run_ranks(fit, 1, kind, strategy, []) == [pytest.approx(expected, rel=1e-5)]


class Stacked(Measured):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...
