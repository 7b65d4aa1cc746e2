"""An optimizer whose step is taken over stays the user's object in all other ways."""

import warnings
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR

from boltmesh.strategies.torch_compat.optimizers import patch_optimizer


class Calls:
    """Takes an optimizer over and notes what is asked of it."""

    def __init__(self, **options: Any) -> None:
        self.parameter = Parameter(torch.ones(2))
        self.optimizer = AdamW([self.parameter], lr=0.1, **options)
        self.seen: list[str] = []

    def take(self) -> Any:
        return patch_optimizer(
            self.optimizer,
            step=lambda _: self.seen.append("step"),
            discard=lambda _, keeps_zeros: self.seen.append(f"discard, zeros {keeps_zeros}"),
            absorb=lambda _: self.seen.append("absorb"),
        )


def test_a_step_runs_the_closure_with_gradients_then_step_hooks_around_ours() -> None:
    calls = Calls()
    calls.take()
    calls.optimizer.register_step_pre_hook(lambda *_: calls.seen.append("before"))
    calls.optimizer.register_step_post_hook(lambda *_: calls.seen.append("after"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.seen.append("closure")
        return 3.0

    with torch.no_grad():
        assert calls.optimizer.step(closure) == 3.0
    assert calls.seen == ["before", "closure", "step", "after"]
    assert torch.equal(calls.parameter.detach(), torch.ones(2))


@pytest.mark.parametrize("is_scheduler_first", [True, False])
def test_schedulers_count_our_steps_and_do_not_warn(is_scheduler_first: bool) -> None:
    calls = Calls()
    if not is_scheduler_first:
        calls.take()
    scheduler = LinearLR(calls.optimizer, 0.5, total_iters=2)
    if is_scheduler_first:
        calls.take()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls.optimizer.step()
        scheduler.step()
    assert calls.seen == ["step"]
    assert calls.optimizer.param_groups[0]["lr"] == pytest.approx(0.075)


def test_gradients_are_discarded_before_they_are_cleared() -> None:
    calls = Calls()
    calls.take()
    calls.parameter.grad = torch.ones(2)
    calls.optimizer.zero_grad(set_to_none=False)
    assert torch.equal(calls.parameter.grad, torch.zeros(2))
    calls.optimizer.zero_grad()
    assert next(iter(calls.optimizer.param_groups[0]["params"])).grad is None
    assert calls.seen == ["discard, zeros True", "discard, zeros False"]


def test_loaded_state_is_absorbed() -> None:
    calls = Calls()
    calls.take()
    calls.optimizer.load_state_dict(calls.optimizer.state_dict())
    assert calls.seen == ["absorb"]


def test_a_gradient_scaler_unscales_for_a_step_that_is_taken_over() -> None:
    calls = Calls(fused=True)
    assert getattr(calls.optimizer, "_step_supports_amp_scaling", False)
    restore = calls.take()
    assert not getattr(calls.optimizer, "_step_supports_amp_scaling", False)
    restore()
    assert getattr(calls.optimizer, "_step_supports_amp_scaling", False)


@pytest.mark.parametrize("has_scheduler", [True, False])
def test_an_optimizer_that_is_given_back_steps_itself(has_scheduler: bool) -> None:
    calls = Calls()
    if has_scheduler:
        LinearLR(calls.optimizer, 0.5)
    restore = calls.take()
    restore()
    calls.parameter.grad = torch.ones(2)
    calls.optimizer.step()
    calls.optimizer.zero_grad()
    assert calls.seen == []
    assert not torch.equal(calls.parameter.detach(), torch.ones(2))
    assert isinstance(calls.optimizer, Optimizer)
