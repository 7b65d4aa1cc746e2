"""ZeRO on 2 and 4 ranks computes in every stage what one process computes."""

from typing import Any

import pytest
from torch import Tensor

from boltmesh.check.differences import Trace
from boltmesh.check.parity import trace_layout
from boltmesh.strategies import ZeROStrategy
from tests.support.cases import BF16, CLIP, ROUGH, SGD, Case, differences, reference
from tests.support.models import Regression, TwoOptimizers
from tests.support.ranks import reuse_ranks as run_ranks

pytestmark = pytest.mark.ranks

STAGES = [(1, 2), (3,)]
"""In one start of the ranks."""


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


def layouts(rank: int, world_size: int, case: Case, stages: tuple[int, ...]) -> list[Trace]:
    return [
        trace_layout(
            case.problem(),
            ZeROStrategy(telemetry=False, stage=stage, **case.strategy),
            devices=world_size,
        )
        for stage in stages
    ]


@pytest.mark.sample(
    "accumulation of 3, clipping, 4 ranks-stages 1 and 2", "tied weights, 4 ranks-stage 3"
)
@pytest.mark.parametrize("stages", STAGES, ids=["stages 1 and 2", "stage 3"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_stage_equals_one_process(case: Case, stages: tuple[int, ...]) -> None:
    wanted = reference(case)
    for traces in run_ranks(layouts, case.ranks, case, stages):
        assert differences(wanted, stages, traces, case.tolerance) == {}
