"""What a step logs for a microbatch is refused where Lightning would refuse it."""

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torchmetrics import SumMetric

from boltmesh.strategies.pipeline.loss.weights import MicrobatchWeights
from boltmesh.strategies.pipeline.step_report import StepLogs

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
