"""ZeRO on 2 and 4 ranks computes in every stage what one process computes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from torch import Tensor

from boltmesh.differences import Tolerance, Trace, find_differences
from boltmesh.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies import ZeROStrategy
from tests.support.models import Regression, TwoOptimizers, regression_data
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks

STAGES = (1, 2, 3)


class Toggled(TwoOptimizers):
    """Leaves it to ``toggle_optimizer`` alone which of the two networks gets gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        losses = []
        for sign, optimizer in zip((1, -1), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = (self.critic(self.generator(inputs)) - targets).square().mean()
            self.manual_backward(sign * loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            losses.append(loss.detach())
        self.log_dict({"generator": losses[0], "critic": losses[1]}, sync_dist=True)
        return losses[0]


@dataclass(frozen=True)
class Case:
    """One combination of what a user may ask for, for every stage."""

    name: str
    ranks: int = 2
    count: int = 48
    batch_size: int = 4
    accumulate: Any = 1
    steps: int = 5
    module: Callable[..., LightningModule] = Stack
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    tolerance: Tolerance = field(default_factory=Tolerance)

    def problem(self) -> Problem:
        data = token_data if self.module is Stack else regression_data
        return Problem(
            module=partial(self.module, **self.model),
            train=partial(data, self.count, self.batch_size),
            validation=partial(data, 21, 4),
            prediction=partial(data, 19, 4) if self.module in {Stack, Regression} else None,
            steps=self.steps,
            accumulate=self.accumulate,
            trainer={"accelerator": "cpu", **self.trainer},
        )


SGD = {"optimizer": "sgd"}
CLIP = {"gradient_clip_val": 0.5}
BF16 = {"precision": "bf16-mixed"}
ROUGH = Tolerance(relative=2e-2, parameters=2e-2, optimizer=5e-2)
"""Of gradients that are added up in bf16, which has 8 bits: the order decides about the last."""

CASES = [
    Case("plain"),
    Case("odd sizes, 4 ranks", ranks=4, count=43, batch_size=3, model=SGD),
    Case("clipping", trainer=CLIP),
    Case("clipping by value", model=SGD,
         trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Case("accumulation of 3, clipping, 4 ranks", ranks=4, accumulate=3, trainer=CLIP, count=52),
    Case("scheduled accumulation", accumulate={0: 1, 1: 2, 2: 3}, count=16, steps=6),
    Case("bf16-mixed, accumulation of 3, clipping", accumulate=3, trainer={**BF16, **CLIP}),
    Case("bf16-true", model=SGD, trainer={"precision": "bf16-true"}, tolerance=ROUGH),
    Case("64 bits", trainer={"precision": "64-true"}),
    Case("two parameter groups, 4 ranks", ranks=4, model={"groups": True}, trainer=CLIP),
    Case("frozen layers", model={"freezes": True}, accumulate=2),
    Case("tied weights, 4 ranks", ranks=4, model={"ties": True}, trainer=CLIP),
    Case("a block that odd steps leave out", model={"skips": True, **SGD}),
    Case("a sequence of layers", module=Regression, accumulate=2),
    Case("several optimizers", module=TwoOptimizers),
    Case("several optimizers that are toggled", module=Toggled),
    Case("a scalar, clipping, accumulation", model={"has_scalar": True}, accumulate=2,
         trainer=CLIP),
    Case("units by name", strategy={"blocks": ["blocks.*.up", "head"]}),
    Case("copies of shards", ranks=4, accumulate=2, strategy={"shard_size": 2}, trainer=CLIP),
]  # fmt: skip


def one_process(rank: int, world_size: int, case: Case) -> Trace:
    return trace_one_process(case.problem(), data_size=case.ranks)


def layouts(rank: int, world_size: int, case: Case) -> list[Trace]:
    return [
        trace_layout(
            case.problem(),
            ZeROStrategy(telemetry=False, stage=stage, **case.strategy),
            devices=world_size,
        )
        for stage in STAGES
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_stage_equals_one_process(case: Case) -> None:
    reference = run_ranks(one_process, 1, case)[0]
    ranks = run_ranks(layouts, case.ranks, case)
    assert len(reference.losses) == case.steps
    assert reference.losses[-1] != reference.losses[0]
    assert reference.validation
    for traces in ranks:
        for stage, trace in zip(STAGES, traces, strict=True):
            found = [
                f"stage {stage}: {each}"
                for each in find_differences(reference, trace, case.tolerance)
            ]
            assert found == []
