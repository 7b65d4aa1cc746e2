"""State that is saved and loaded in the midst of a run: the next step knows that, and no other."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, NAdam, Optimizer

from boltmesh.strategies.checkpoint.optimizer_state import named_state
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


def looks(rank: int, world_size: int) -> None:
    for kind in MAKES:
        _look(kind)


def test_saving_changes_no_step_that_follows() -> None:
    run_ranks(looks, 2)
