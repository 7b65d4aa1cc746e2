"""One combination of what a user may ask for, and what one process computes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule

from boltmesh.check.differences import Tolerance, Trace, find_differences
from boltmesh.check.parity import Problem, trace_one_process
from tests.support.gpts import text_data
from tests.support.models import Autoencoder, Regression, TwoOptimizers, regression_data
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

SGD = {"optimizer": "sgd"}
CLIP = {"gradient_clip_val": 0.5}
BF16 = {"precision": "bf16-mixed"}
ROUGH = Tolerance(relative=2e-2, parameters=2e-2, optimizer=5e-2)
"""Of what is added up in bf16, which has 8 bits: the order decides about the last."""


@dataclass(frozen=True)
class Case:
    """A subclass says which model is meant and which ranks have batches of their own."""

    name: str
    ranks: int = 2
    count: int = 48
    batch_size: int = 4
    accumulate: Any = 1
    steps: int = 5
    module: type[LightningModule] = Stack
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    tolerance: Tolerance = field(default_factory=Tolerance)

    @property
    def data_size(self) -> int:
        """How many ranks, or groups of ranks, have batches of their own."""
        return self.ranks

    def problem(self) -> Problem:
        data, predicts = _data_of(self.module)
        return Problem(
            module=partial(self.module, **self.model),
            train=partial(data, self.count, self.batch_size),
            validation=partial(data, 21, 4),
            prediction=partial(data, 19, 4) if predicts else None,
            steps=self.steps,
            accumulate=self.accumulate,
            trainer={"accelerator": "cpu", **self.trainer},
        )


def _data_of(module: Any) -> tuple[Callable[..., Any], bool]:
    """What a model trains on, and whether it predicts."""
    assert isinstance(module, type), module
    predicts = getattr(module, "predict_step") is not LightningModule.predict_step  # noqa: B009
    if issubclass(module, (Autoencoder, Regression, TwoOptimizers)):
        return regression_data, predicts
    return (token_data if issubclass(module, Stack) else text_data), predicts


def one_process(rank: int, world_size: int, case: Case) -> Trace:
    return trace_one_process(case.problem(), data_size=case.data_size, is_dealt=case.data_size > 1)


def reference(case: Case) -> Trace:
    """What one process computes of a case, which has to be something."""
    trace: Trace = run_ranks(one_process, 1, case)[0]
    assert len(trace.losses) == case.steps
    assert trace.losses[-1] != trace.losses[0]
    assert trace.validation
    return trace


def differences(
    wanted: Trace, layouts: Sequence[object], traces: Sequence[Trace], tolerance: Tolerance
) -> dict[object, list[str]]:
    """By layout what differs from one process, where anything does."""
    found = {
        layout: [str(each) for each in find_differences(wanted, trace, tolerance)]
        for layout, trace in zip(layouts, traces, strict=True)
    }
    return {layout: each for layout, each in found.items() if each}
