"""Optimizers that mix elements or parameters are found, and a trial leaves no trace."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from boltmesh.errors import CheckpointError, UnsupportedError
from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.optimizer_probe import (
    mixes_elements,
    mixes_parameters,
    needs_all_ranks,
    shard_mismatch,
    steps_in_rounds,
)
from tests.support.matrix_optimizers import Combined, Lamb, Shampoo, Soap
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data


class DistanceAdam(Optimizer):
    """Adam whose step size is an estimate of the distance to the solution, as in Prodigy.

    Source: Mishchenko and Defazio 2024, algorithm 4, https://arxiv.org/abs/2306.06101
    """

    def __init__(self, parameters: Any, growth: float = 1.0) -> None:
        super().__init__(parameters, {"d": 1e-6, "r": 0.0, "growth": growth, "lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        group = self.param_groups[0]
        d, beta1, beta2 = group["d"], 0.9, 0.999
        beta3 = beta2**0.5
        correlation, size = 0.0, 0.0
        for each in group["params"]:
            state = self.state[each]
            if not state:
                state["start"] = each.flatten().clone()
                state["s"] = torch.zeros_like(each.flatten())
                state["m"], state["v"] = torch.zeros_like(each), torch.zeros_like(each)
            gradient = each.grad.flatten()
            correlation += torch.dot(gradient, state["start"] - each.flatten()).item()
            state["s"].mul_(beta3).add_(gradient, alpha=(1 - beta3) * d * d)
            size += state["s"].abs().sum().item()
            state["m"].mul_(beta1).add_(each.grad, alpha=(1 - beta1) * d)
            state["v"].mul_(beta2).addcmul_(each.grad, each.grad, value=(1 - beta2) * d * d)
            each.addcdiv_(state["m"], state["v"].sqrt() + d * 1e-8, value=-d)
        group["r"] = beta3 * group["r"] + (1 - beta3) * d * d * correlation
        group["d"] = max(d, group["growth"] * group["r"] / size)


class Directed(SGD):
    """Turns a parameter's gradient round when it points away from the sum of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        sign = torch.sign(sum(each.grad.sum() for each in parameters))
        for each in parameters:
            each.grad.mul_(sign)
        super().step()


class LimitsEach(SGD):
    """Shortens a parameter's gradient whose norm is very large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            each.grad.mul_((1000 / each.grad.norm()).clamp(max=1))
        super().step()


class Sharpness(Optimizer):
    """Takes the gradient where the loss is higher, along the direction of all gradients (SAM).

    Source: Foret et al. 2021, https://arxiv.org/abs/2010.01412
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = SGD(self.param_groups, lr=0.1)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        steps = [each.grad * (0.05 / norm) for each in parameters]
        for each, step in zip(parameters, steps, strict=True):
            each.add_(step)
        with torch.enable_grad():
            closure()
        for each, step in zip(parameters, steps, strict=True):
            each.sub_(step)
        self.inner.step()


class Averaging(Optimizer):
    """Steps another optimizer, and goes back half of the way in every fifth step (Lookahead).

    Source: Zhang et al. 2019, https://arxiv.org/abs/1907.08610
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        self.count += 1
        for each in self.param_groups[0]["params"]:
            slow: Tensor = self.state[each].setdefault("slow", each.clone())
            if self.count % 5 == 0:
                each.copy_(slow.lerp_(each, 0.5))


class Captures(SGD):
    """Keeps its parameters in a list of its own, and steps them."""

    def __init__(self, parameters: Any) -> None:
        self.mine = list(parameters)
        super().__init__(self.mine, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.mine:
            each.add_(1)


class FactorsLarge(Optimizer):
    """Divides by means over rows where a matrix is large, as Adafactor of timm does."""

    def __init__(self, parameters: Any, least: int = 128) -> None:
        super().__init__(parameters, {"lr": 0.1, "least": least})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for each in group["params"]:
            size = each.grad.square()
            if each.dim() > 1 and min(each.shape) >= group["least"]:
                size = size.mean(1, keepdim=True)
            each.sub_(each.grad * size.rsqrt(), alpha=group["lr"])


class Decays(SGD):
    """Makes parameters smaller, also those without a gradient, as some forms of Muon do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            each.mul_(0.9)


class Switched(SGD):
    """Steps between ``train`` and ``eval`` alone, as the optimizers of ``schedulefree`` do."""

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.param_groups[0].get("train_mode"):
            raise RuntimeError("Optimizer was not in train mode when step is called.")
        super().step(closure)


class Draws(SGD):
    """Draws from every generator of the host."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        scale = 1 + random.random() + float(np.random.rand()) + float(torch.rand(()))
        for each in self.param_groups[0]["params"]:
            each.grad.mul_(scale)
        super().step()


def parameters() -> list[Parameter]:
    return [Parameter(torch.ones(4, 4)), Parameter(torch.ones(2, 8)), Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("build", "elements", "parameters_too"),
    [
        (DistanceAdam, True, True),
        (lambda own: DistanceAdam(own, growth=0.2), True, True),
        (lambda own: Directed(own, lr=0.1), True, True),
        (lambda own: LimitsEach(own, lr=0.1), True, False),
        (Sharpness, True, True),
        (lambda own: Averaging(SGD(own, lr=0.1)), False, False),
        (lambda own: Averaging(LimitsEach(own, lr=0.1)), True, False),
        (FactorsLarge, True, False),
        (lambda own: FactorsLarge(own, least=1000), False, False),
        (lambda own: Combined(SGD(own[:1], lr=0.1), LimitsEach(own[1:], lr=0.1)), True, False),
        (lambda own: Combined(Decays(own, lr=0.1)), False, False),
        (Captures, True, False),
        (lambda own: Switched(own, lr=0.1), False, False),
        (torch.optim.Adagrad, False, False),
    ],
)
def test_what_a_step_depends_on_is_found(
    build: Callable[[Any], Optimizer], elements: bool, parameters_too: bool
) -> None:
    own = parameters()
    optimizer = build(own)
    num_states = len(optimizer.state)
    assert mixes_elements(optimizer) == elements
    assert mixes_parameters(optimizer) == parameters_too
    assert all(bool((each == 1).all()) for each in own)
    assert len(optimizer.state) == num_states


class Counts(SGD):
    """Counts its calls in an attribute, and halves its steps after many."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for each in self.param_groups[0]["params"]:
            each.grad.div_(2 if self.calls > 1000 else 1)
        super().step()


class CountsInGroup(Counts):
    """As many published ones do; the key is not there before the first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for each in group["params"]:
                each.add_(each.grad, alpha=-group["lr"] / group["step"])


class CountsInFloat(SGD):
    """Counts its calls in a tensor and in a float."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params)
        self.calls: Any = torch.zeros(()) if kind == "tensor" else 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1.0
        super().step()


class ReadsFirst(SGD):
    """Reads the first parameter of a group, of which a round may have none."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.param_groups[0]["params"][0].dim() > 0
        super().step()


class Scheduling(Combined):
    """Steps schedulers of its own, which a trial must not do."""

    def __init__(self, *inner: Optimizer) -> None:
        super().__init__(*inner)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in inner]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each, scheduler in zip(self.inner, self.schedulers, strict=True):
            each.step()
            scheduler.step()


class EverySecond(Combined):
    """Makes every second step with one of the optimizers alone."""

    is_second = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.inner[: 1 if self.is_second else 2]:
            each.step()
        self.is_second = not self.is_second


def combined(kind: type[Combined], *inner: type[Optimizer]) -> Optimizer:
    return kind(*(each([Parameter(torch.ones(3, 3))]) for each in inner))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "in_rounds"),
    [
        (lambda: torch.optim.Muon(parameters()[:1]), True),
        (lambda: Shampoo(parameters()), True),
        (lambda: Soap(parameters()), True),
        (lambda: CountsInGroup(parameters()), True),
        (lambda: Counts(parameters()), False),
        (lambda: CountsInFloat(parameters(), "float"), False),
        (lambda: CountsInFloat(parameters(), "tensor"), False),
        (lambda: ReadsFirst(parameters()), False),
        (lambda: Directed(parameters()), False),
        (lambda: combined(Combined, torch.optim.Muon, torch.optim.AdamW), True),
        (lambda: combined(Scheduling, torch.optim.Muon, torch.optim.AdamW), False),
        (lambda: combined(Combined, torch.optim.Muon, Lamb), True),
        (lambda: combined(Combined, torch.optim.Muon, Counts), False),
        (lambda: combined(EverySecond, torch.optim.Muon, torch.optim.AdamW), False),
    ],
)
def test_what_may_be_stepped_one_parameter_after_the_other_is_found(
    make: Callable[[], Optimizer], in_rounds: bool
) -> None:
    optimizer = make()
    before = repr((optimizer.state_dict(), vars(optimizer)))
    drawn = torch.get_rng_state()
    assert steps_in_rounds(optimizer) == in_rounds
    assert repr((optimizer.state_dict(), vars(optimizer))) == before
    assert torch.equal(torch.get_rng_state(), drawn)


def hooked_by_trials(rank: int, world_size: int) -> bool:
    assert steps_in_rounds(CountsInGroup(parameters()))
    return hasattr(SGD.step, "hooked")


@pytest.mark.ranks
def test_a_trial_leaves_the_base_of_an_optimizer_without_step_hooks() -> None:
    assert run_ranks(hooked_by_trials, 1) == [False]  # a derived step would run them twice


def test_optimizers_within_another_one_have_to_step_its_groups() -> None:
    combined = Combined(Decays(parameters(), lr=0.1), SGD(parameters(), lr=0.1))
    assert needs_all_ranks(combined) is None
    combined.param_groups = [{**each} for each in combined.param_groups]
    assert needs_all_ranks(combined) == (
        "steps other optimizers, which have parameter groups of their own"
    )


def test_a_trial_neither_draws_nor_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeds(*arguments: object) -> None:
        raise AssertionError("this seeds the generators of all devices")

    monkeypatch.setattr(torch, "manual_seed", seeds)
    monkeypatch.setattr(torch.random, "manual_seed", seeds)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    optimizer = Draws(parameters(), lr=0.1)
    assert not mixes_elements(optimizer)
    assert not mixes_parameters(optimizer)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert repr(np.random.get_state()) == repr(states[2])


class Distant(Stack):
    def configure_optimizers(self) -> Any:
        return DistanceAdam(self.parameters())


class ByRows(Optimizer):
    """Scales by rows, as Adafactor of transformers does: its state is no shard."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            rows = self.state[each].setdefault("rows", torch.zeros(each.shape[0]))
            rows.add_(each.grad.flatten(1).square().mean(1) if each.dim() > 1 else each.grad)
            each.sub_(each.grad, alpha=float(rows.sum()))


class Rows(Stack):
    def configure_optimizers(self) -> Any:
        return ByRows([{"params": list(self.parameters())}], {})


def fit(rank: int, world_size: int, kind: type[Stack], stage: int) -> str:
    """Return what a model is refused with before its first step."""
    trainer = Trainer(
        accelerator="cpu", devices=world_size, max_steps=1, logger=False, max_epochs=1,
        strategy=ZeROStrategy(stage=stage, telemetry=False),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(kind(), token_data(8, 2))
    except (CheckpointError, UnsupportedError) as refused:
        return f"{trainer.global_step} {refused}"
    return "fitted"


@pytest.mark.ranks
def test_what_fails_on_shards_is_refused_before_the_first_step() -> None:
    for said in run_ranks(fit, 2, Distant, 3):
        assert said.startswith("0 DistanceAdam computes with whole parameters, and fails on shards")
        assert "Use bolt_ddp, or" in said


@pytest.mark.full
@pytest.mark.ranks
def test_what_needs_one_whole_parameter_at_a_time_is_not_refused() -> None:
    assert run_ranks(fit, 2, Rows, 1) == ["fitted", "fitted"]


class Stable(SGD):
    """Limits the root mean square of a step, which it computes in place, as StableAdamW does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            each.grad /= each.grad.square().mean().sqrt_().clip_(min=1.0)
        super().step()


def mismatch(rank: int, world_size: int) -> str | None:
    mesh = init_device_mesh("cpu", (world_size,))
    return shard_mismatch(Stable(parameters(), lr=0.1), mesh, [Shard(0)])


@pytest.mark.ranks
def test_what_fails_on_shards_of_one_size_alone_is_found() -> None:
    said = "computes with whole parameters, and fails on shards"
    assert run_ranks(mismatch, 2) == [said, said]


class Gathering(Optimizer):
    """Shares out its work itself, as forms of Muon for several ranks do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            gradient = each.grad @ each.grad.T @ each.grad
            dist.all_reduce(gradient)
            each.sub_(gradient, alpha=1e-3)


class Gathers(Stack):
    def configure_optimizers(self) -> Any:
        return Gathering([{"params": [each for each in self.parameters() if each.dim() == 2]}], {})


@pytest.mark.full
@pytest.mark.ranks
def test_a_matrix_optimizer_that_communicates_itself_is_refused() -> None:
    for said in run_ranks(fit, 2, Gathers, 2):
        assert said.startswith("0 Gathering communicates in its step, and ranks step other")


class Remembers(Averaging):
    """Has more in its ``state_dict`` than torch's optimizers, as Lookahead of torch_optimizer."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict(), "count": self.count}


class Remembering(Stack):
    def configure_optimizers(self) -> Any:
        return Remembers(SGD(self.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.ranks
def test_state_that_shards_do_not_hold_is_refused() -> None:
    for said in run_ranks(fit, 2, Remembering, 1):
        assert said.startswith("0 Remembers.state_dict saves more than Remembers.state holds")
        assert "or bolt_ddp" in said
