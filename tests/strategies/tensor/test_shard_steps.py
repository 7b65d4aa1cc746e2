"""Optimizers that need more than a rank's elements are found by trying them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from boltmesh.errors import ConfigError
from boltmesh.strategies.optimizer_probe import find_mixing, mixes_elements


class Lars(torch.optim.SGD):
    """Scales the gradient of each parameter by norms of both."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.mul_(each.norm() / each.grad.norm())
        super().step(closure)


class ClippedAdam(torch.optim.AdamW):
    """Clips by the norm of all gradients that it sees."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        super().step(closure)


class Estimating(torch.optim.SGD):
    """In the manner of D-adaptation: a tiny rate that grows with what all gradients have shown."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        seen = sum(float(each.grad.abs().sum()) for each in group["params"])
        group["lr"] = group.get("estimate", 1e-8)
        group["estimate"] = group["lr"] * (1 + seen)
        super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            each.grad.add_(torch.randn_like(each))
        super().step(closure)


class Lookahead(Optimizer):
    """Steps another one within."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def matrices() -> list[Parameter]:
    return [Parameter(torch.randn(4, 4)), Parameter(torch.randn(2, 8))]


def mixed() -> list[Parameter]:
    return [*matrices(), Parameter(torch.randn(4))]


ELEMENTWISE: list[Callable[[], Optimizer]] = [
    lambda: torch.optim.SGD(mixed(), lr=0.1, momentum=0.9, nesterov=True),
    lambda: torch.optim.AdamW(mixed(), lr=0.1),
    lambda: torch.optim.AdamW(mixed(), lr=0.0),
    lambda: torch.optim.Adam(mixed(), lr=0.1, amsgrad=True, foreach=True),
    lambda: torch.optim.AdamW(mixed(), lr=0.1, fused=True),
    lambda: torch.optim.RMSprop(mixed(), lr=0.1),
    lambda: torch.optim.Adagrad(mixed(), lr=0.1),
    lambda: torch.optim.NAdam(mixed(), lr=0.1),
    lambda: torch.optim.Rprop(mixed(), lr=0.1),
    lambda: Lookahead(torch.optim.AdamW(mixed())),
]
OF_WHOLE_PARAMETERS: list[Callable[[], Optimizer]] = [
    lambda: torch.optim.Adafactor(mixed(), lr=0.1),
    lambda: Lars(mixed(), lr=0.1),
    lambda: Lars(mixed(), lr=0.0),
    lambda: Lars(matrices(), lr=0.1),
]
if hasattr(torch.optim, "Muon"):
    OF_WHOLE_PARAMETERS.append(lambda: torch.optim.Muon(matrices(), lr=0.1))
OTHERS: list[Callable[[], Optimizer]] = [
    lambda: torch.optim.LBFGS(mixed()),
    lambda: ClippedAdam(mixed()),
    lambda: Estimating(mixed(), lr=0.1),
    lambda: Noisy(mixed(), lr=0.1),
]


@pytest.mark.parametrize("build", ELEMENTWISE)
def test_optimizers_of_elements_are_taken(build: Callable[[], Optimizer]) -> None:
    optimizer = build()
    before = [each.clone() for group in optimizer.param_groups for each in group["params"]]
    num_states = len(optimizer.state)
    assert not mixes_elements(optimizer)
    after = [each for group in optimizer.param_groups for each in group["params"]]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert len(optimizer.state) == num_states


@pytest.mark.sample("<lambda>0", "<lambda>3")
@pytest.mark.parametrize("build", OTHERS)
def test_optimizers_of_more_than_elements_are_refused_by_name(
    build: Callable[[], Optimizer],
) -> None:
    optimizer = build()
    with pytest.raises(ConfigError, match=type(optimizer).__name__):
        find_mixing([torch.optim.SGD(mixed(), lr=0.1), optimizer])


@pytest.mark.sample("<lambda>0", "<lambda>3", "<lambda>4")
@pytest.mark.parametrize("build", OF_WHOLE_PARAMETERS)
def test_optimizers_of_whole_parameters_are_found(build: Callable[[], Optimizer]) -> None:
    optimizer = build()
    plain = torch.optim.SGD(mixed(), lr=0.1)
    assert find_mixing([plain, optimizer]) == [optimizer]
