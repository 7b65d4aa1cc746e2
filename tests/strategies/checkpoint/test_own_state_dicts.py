"""Optimizers that save by a state_dict of their own: stored whole, or refused."""

from typing import Any

import pytest
import torch
from torch.nn import Linear
from torch.optim import SGD, AdamW, Optimizer
from typing_extensions import override

from boltmesh.errors import CheckpointError
from boltmesh.strategies.checkpoint.optimizer_state import load_state, named_state


class Lookahead(Optimizer):
    """Slow weights in its own state, the rest in another optimizer's."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    @override
    def step(self, closure: Any = None) -> Any:
        self.inner.step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each].setdefault("slow", each.detach().clone())


class Beside(Lookahead):
    """Adds the other's, as that of torch_optimizer."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict()}


class Instead(Lookahead):
    """Saves the other's, which has two tensors of each parameter, as that of timm."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


class Copying(AdamW):
    """Saves copies of its state."""

    @override
    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        copies = {
            number: {key: value.clone() for key, value in state.items()}
            for number, state in saved["state"].items()
        }
        return {**saved, "state": copies}


def stepped(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [Beside, Instead])
def test_an_optimizer_that_saves_more_than_its_state_is_refused(kind: type[Lookahead]) -> None:
    model = Linear(3, 2)
    optimizer = stepped(kind(AdamW(model.parameters())))
    with pytest.raises(CheckpointError, match=f"{kind.__name__}.state_dict saves more than"):
        named_state(model, optimizer)


def test_one_that_saves_its_state_in_another_way_is_stored() -> None:
    model = Linear(3, 2)
    state = named_state(model, stepped(Copying(model.parameters())))["state"]
    assert {name: set(each) for name, each in state.items()} == {
        name: {"step", "exp_avg", "exp_avg_sq"} for name in ("weight", "bias")
    }


def test_a_file_with_more_than_a_state_is_refused() -> None:
    model = Linear(3, 2)
    optimizer = stepped(Beside(AdamW(model.parameters())))
    saved = optimizer.state_dict()
    with pytest.raises(CheckpointError, match="holds 'inner' beside the state of Beside"):
        load_state(model, optimizer, saved)


@pytest.mark.parametrize("makes_adam", [True, False])
def test_the_state_of_another_optimizer_is_refused(makes_adam: bool) -> None:
    model = Linear(3, 2)
    optimizers: list[Optimizer] = [AdamW(model.parameters()), SGD(model.parameters(), lr=0.1)]
    saved = named_state(model, stepped(optimizers[makes_adam]))
    optimizer = optimizers[not makes_adam]
    rate = optimizer.param_groups[0]["lr"]
    with pytest.raises(CheckpointError, match=f"another optimizer: .*{type(optimizer).__name__}"):
        load_state(model, optimizer, saved)
    assert optimizer.param_groups[0]["lr"] == rate
    assert not optimizer.state
