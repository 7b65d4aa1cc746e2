"""What a step logs for a microbatch is refused where Lightning would refuse it."""

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torchmetrics import SumMetric

from boltmesh.strategies.patch import patched
from boltmesh.strategies.pipeline.loss.log_rules import MicrobatchWeights
from boltmesh.strategies.pipeline.step_report import StepLogs, repeat

REFUSED: list[tuple[Any, str]] = [
    (None, r"`self\.log\('loss', \.\.\.\)` was called with a NoneType.*Log numbers"),
    ("low", "a str, which cannot be logged"),
    ([1, 2], "a list, which cannot be logged"),
    ({"a": {"b": 1}}, "a dict, which cannot be logged"),
    (torch.ones(3), r"a tensor of 3 elements.*mean\(\)"),
    (SumMetric(), r"a SumMetric that is no attribute.*self\.metric = \.\.\."),
]


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_what_cannot_be_logged_is_refused_by_name(value: Any, message: str) -> None:
    module = LightningModule()
    with StepLogs(module).of_microbatch(0), pytest.raises(ValueError, match=message):
        module.log("loss", value)


def test_numbers_of_all_kinds_are_logged() -> None:
    module = LightningModule()
    logs = StepLogs(module)
    values = {"a": 2, "b": 2.0, "c": np.float32(2), "d": torch.tensor([2]), "e": True}
    with logs.of_microbatch(0):
        for name, value in values.items():
            module.log(name, value)
    logged = logs.collected(MicrobatchWeights({0: 1.0}, {0: 1.0}))
    assert {each.name: float(each.value) for each in logged} == {**dict.fromkeys("abcd", 2), "e": 1}  # type: ignore[arg-type]


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_key_that_is_logged_twice_shows_the_last_value_as_the_steps(
    num_microbatches: int,
) -> None:
    """As Lightning does, which counts both for the epoch."""
    module = LightningModule()
    logs = StepLogs(module)
    for number in range(num_microbatches):
        with logs.of_microbatch(number):
            for value in (1.0, 5.0):
                module.log("loss", value, on_step=True, on_epoch=True)
                module.log_dict({"a": value, "b": -value})
                module.log("group", {"a": value})  # type: ignore[arg-type]
    rows = dict.fromkeys(range(num_microbatches), 2.0)
    collected = logs.collected(MicrobatchWeights(rows, rows))
    made: list[tuple[str, Any]] = []

    def log(name: str, value: Any, **_: Any) -> None:
        made.append((name, {k: float(v) for k, v in value.items()} if name == "group" else value))

    with patched(module, log=log):
        repeat(module, collected)
    for name, values in {"loss": [1, 5], "a": [1, 5], "b": [-1, -5]}.items():
        assert [value for key, value in made if key == name] == values
    assert [value for key, value in made if key == "group"] == [{"a": 1.0}, {"a": 5.0}]


def test_calls_in_a_loop_over_rows_are_one() -> None:
    module = LightningModule()
    logs = StepLogs(module)
    for number, rows in enumerate([3, 1]):
        with logs.of_microbatch(number):
            for row in range(rows):
                module.log("length", float(row))
    (found,) = logs.collected(MicrobatchWeights({0: 1.0, 1: 1.0}, {0: 3.0, 1: 1.0}))
    assert found.value == 0.75
