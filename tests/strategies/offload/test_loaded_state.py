"""State that is saved and loaded in the midst of a run: the next step knows that, and no other."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, NAdam, Optimizer

from boltmesh.strategies.checkpoint.optimizer_state import load_state, named_state
from tests.support.offloaded import Twin, full
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

CLOSE = 2e-6
"""Of steps by another kernel; parameters move by 1e-2 a step."""

MAKES: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": partial(AdamW, lr=0.01),
    "NAdam": partial(NAdam, lr=0.01),
    "SGD": partial(SGD, lr=0.05, momentum=0.9, dampening=0.5),
}


def _load(twin: Twin, saved: Any) -> None:
    """Load as a strategy does, which the finder of learning rates calls, too."""
    twin.engine.prepare_state(twin.optimizer)
    load_state(twin.ours, twin.optimizer, saved)
    twin.engine.absorb_state(twin.optimizer)


def _whole(twin: Twin) -> dict[str, Any]:
    """State by names as a checkpoint has it."""
    twin.engine.synchronize()
    saved = named_state(twin.ours, twin.optimizer)
    state = {
        name: {k: full(v).clone() if isinstance(v, torch.Tensor) else v for k, v in of_one.items()}
        for name, of_one in saved["state"].items()
    }
    return {**copy.deepcopy({**saved, "state": {}}), "state": state}


def _twin(kind: str) -> Twin:
    # The fused kernel is ours too; any other one rounds where gradients are next to nothing.
    like: Any = partial(AdamW, lr=0.01, fused=True) if kind == "AdamW" else MAKES[kind]
    return Twin(make=MAKES[kind], make_reference=like)


def _look(kind: str) -> None:
    """Take the state as a checkpoint does, and go on."""
    twin = _twin(kind)
    twin.train(2)
    _whole(twin)
    twin.train(3)
    twin.engine.synchronize()
    assert twin.difference() < CLOSE


def _back(kind: str, steps: int, *, by_torch: bool = False) -> None:
    """Go back to the state after so many steps, and on."""
    twin = _twin(kind)
    twin.train(steps)
    saved = _whole(twin)
    by_number = copy.deepcopy(twin.optimizer.state_dict()) if by_torch else {}
    expected = copy.deepcopy(twin.reference_optimizer.state_dict())
    twin.train(3)
    twin.reference_optimizer.load_state_dict(expected)
    if by_torch:
        twin.optimizer.load_state_dict(by_number)
    else:
        _load(twin, saved)
    assert len(_whole(twin)["state"]) == len(expected["state"])
    twin.train(2)
    twin.engine.synchronize()
    assert twin.difference() < CLOSE


def looks(rank: int, world_size: int) -> None:
    for kind in MAKES:
        _look(kind)


def test_saving_changes_no_step_that_follows() -> None:
    run_ranks(looks, 2)


def loads(rank: int, world_size: int) -> None:
    for kind in MAKES:
        for steps in (0, 2):
            _back(kind, steps)
        _back(kind, 0, by_torch=True)


def test_an_optimizer_goes_on_from_what_was_loaded() -> None:
    run_ranks(loads, 2)
