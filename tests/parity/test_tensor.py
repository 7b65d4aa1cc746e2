"""Tensor parallelism on 2 and 4 ranks computes what one process computes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from boltmesh.differences import Tolerance, Trace, find_differences
from boltmesh.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies import TensorParallelStrategy
from tests.support.gpts import TinyGPT, text_data
from tests.support.models import Regression, TwoOptimizers, regression_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Case:
    """One combination of what a user may ask for."""

    name: str
    ranks: int = 2
    size: int | None = None
    count: int = 48
    batch_size: int = 4
    accumulate: Any = 1
    steps: int = 5
    module: Callable[..., LightningModule] = TinyGPT
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    tolerance: Tolerance = field(default_factory=Tolerance)
    least: float = 0.7
    """How much of the model has to be divided, of its elements."""

    @property
    def data_size(self) -> int:
        return self.ranks // (self.size or self.ranks)

    def problem(self) -> Problem:
        data = regression_data if self.module in {Regression, TwoOptimizers} else text_data
        return Problem(
            module=partial(self.module, **self.model),
            train=partial(data, self.count, self.batch_size),
            validation=partial(data, 21, 4),
            prediction=partial(data, 19, 4) if self.module in {TinyGPT, Regression} else None,
            steps=self.steps,
            accumulate=self.accumulate,
            trainer={"accelerator": "cpu", **self.trainer},
        )


SGD = {"optimizer": "sgd"}
CLIP = {"gradient_clip_val": 0.5}
BF16 = {"precision": "bf16-mixed"}
ROUGH = Tolerance(relative=2e-2, parameters=2e-2, optimizer=5e-2)
"""Of products that are added up in bf16, which has 8 bits: the order decides about the last."""

CASES = [
    Case("plain"),
    Case("separate q, k, v, 4 ranks", ranks=4, model={"is_fused": False}),
    Case("odd batches", count=43, batch_size=3, model=SGD),
    Case("tied", ranks=2, model={"ties": True}, trainer=CLIP),
    Case("clipping, 4 ranks", ranks=4, trainer=CLIP),
    Case("clipping by value", model=SGD,
         trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Case("accumulation of 3, clipping", accumulate=3, trainer=CLIP, count=52),
    Case("scheduled accumulation", accumulate={0: 1, 1: 2, 2: 3}, count=16, steps=6),
    Case("two groups of replicas", ranks=4, size=2, trainer=CLIP, accumulate=2),
    Case("replicas, odd batches", ranks=4, size=2, count=43, batch_size=3, model=SGD),
    Case("bf16-mixed", model=SGD, trainer={**BF16, **CLIP}, tolerance=ROUGH),
    Case("bf16-true", model=SGD, trainer={"precision": "bf16-true"}, tolerance=ROUGH),
    Case("64 bits", trainer={"precision": "64-true"}),
    Case("two parameter groups, schedule", model={"groups": True}, trainer=CLIP),
    Case("frozen layers", model={"freezes": True}, accumulate=2, trainer=CLIP),
    Case("recomputation", strategy={"activation_checkpointing": "full"}),
    Case("an odd vocabulary, tied, 4 ranks", ranks=4, model={"vocabulary": 27, "ties": True}),
    Case("logits are joined", strategy={"loss_parallel": False}, least=0.6),
    Case("logits stay divided", strategy={"loss_parallel": True}, trainer=CLIP),
    Case("a sequence that is divided", strategy={"sequence_parallel": True}, trainer=CLIP),
    Case("a sequence that is divided and computed again, 2 groups, bf16", ranks=4, size=2, steps=2,
         model=SGD, strategy={"sequence_parallel": True, "activation_checkpointing": "full"},
         trainer=BF16, tolerance=ROUGH),
    Case("a group of one rank", ranks=1, accumulate=3, trainer=CLIP, count=52),
    Case("a divided sequence that is computed again", model={"is_fused": False},
         strategy={"sequence_parallel": True, "activation_checkpointing": "full"}),
    Case("a plan of the user's", strategy={"plan": {"blocks.*.attention*": "whole"}}, least=0.4),
    Case("adapters beside frozen layers", model={"lora": 2}, trainer=CLIP, least=0.5),
    Case("a sequence of layers", module=Regression, model={"width": 12}, accumulate=2, least=0.5),
    Case("several optimizers", module=TwoOptimizers, least=0.0),
]  # fmt: skip


def one_process(rank: int, world_size: int, case: Case) -> Trace:
    return trace_one_process(case.problem(), data_size=case.data_size, is_dealt=case.data_size > 1)


def layout(rank: int, world_size: int, case: Case) -> tuple[Trace, float, tuple[str, ...]]:
    strategy = TensorParallelStrategy(telemetry=False, size=case.size, **case.strategy)
    trace = trace_layout(case.problem(), strategy, devices=world_size)
    plan = strategy.plan
    if world_size == 1:
        assert plan is None, "there is nobody to divide anything with"
        return trace, 1.0, ()
    assert plan is not None
    divided = sum(each.elements for each in plan.sharded.values())
    return trace, divided / sum(each.numel() for each in trace.parameters.values()), plan.notes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_equals_one_process(case: Case) -> None:
    reference = run_ranks(one_process, 1, case)[0]
    ranks = run_ranks(layout, case.ranks, case)
    assert len(reference.losses) == case.steps
    assert reference.losses[-1] != reference.losses[0]
    assert reference.validation
    for trace, share, notes in ranks:
        assert share >= case.least, notes
        assert [*map(str, find_differences(reference, trace, case.tolerance))] == []
