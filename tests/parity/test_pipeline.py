"""A pipeline of 2 and 4 ranks computes, in every schedule, what one process computes."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from boltmesh.check.differences import Tolerance, Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks

ONE_CHUNK = ("gpipe", "1f1b", "zero_bubble")
SEVERAL_CHUNKS = ("looped_bfs", "interleaved_1f1b", "zbv", "dualpipev")
CLIP = {"gradient_clip_val": 0.5}
BF16 = {"precision": "bf16-mixed"}
ROUGH = Tolerance(relative=2e-2, parameters=2e-2, optimizer=5e-2)
"""Of gradients that are added up in bf16: microbatches are added in another order."""


@dataclass(frozen=True)
class Case:
    """One combination of what a user may ask for."""

    name: str
    ranks: int = 2
    schedules: tuple[str, ...] = ("1f1b",)
    microbatches: int = 4
    count: int = 44
    batch_size: int = 8
    shuffle: bool = False
    accumulate: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    tolerance: Tolerance = field(default_factory=Tolerance)

    def problem(self) -> Problem:
        return Problem(
            module=partial(Stack, depth=8, **self.model),
            train=partial(token_data, self.count, self.batch_size, shuffle=self.shuffle),
            validation=partial(token_data, 21, 8),
            prediction=partial(token_data, 19, 8),
            steps=5,
            accumulate=self.accumulate,
            trainer={"accelerator": "cpu", **self.trainer},
        )


CASES = [
    Case("schedules of one chunk", schedules=ONE_CHUNK, microbatches=8, count=64, batch_size=16),
    Case("schedules of several chunks", schedules=SEVERAL_CHUNKS, microbatches=8,
         count=64, batch_size=16),
    Case("4 ranks, tied weights", ranks=4, schedules=("1f1b", "zbv"),
         batch_size=16, model={"ties": True}, trainer=CLIP),
    Case("4 ranks, tied weights, interleaved", ranks=4, schedules=("interleaved_1f1b",),
         batch_size=16, model={"ties": True}, trainer=CLIP),
    Case("shuffled batches that do not divide", shuffle=True, batch_size=7,
         schedules=("1f1b", "zbv"), count=40),
    Case("clipping, accumulation of 3", accumulate=3, trainer=CLIP, count=52),
    Case("clipping by value", model={"optimizer": "sgd"},
         trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    Case("two parameter groups", model={"groups": True}, schedules=("zero_bubble",)),
    Case("frozen layers", model={"freezes": True}, schedules=("1f1b", "zbv")),
    Case("tied weights, a scalar", model={"ties": True, "has_scalar": True}, trainer=CLIP),
    Case("a split by name", strategy={"split": ["blocks.2"]}),
    Case("one microbatch", microbatches=1, schedules=("gpipe",)),
    Case("64-true", trainer={"precision": "64-true"}, model={"ties": True}, schedules=("zbv",)),
    Case("bf16-true", trainer={"precision": "bf16-true"}, tolerance=ROUGH,
         model={"optimizer": "sgd"}),
    Case("16-true", trainer={"precision": "16-true"}, tolerance=ROUGH,
         model={"optimizer": "sgd"}),
    Case("bf16-mixed", trainer=BF16, tolerance=ROUGH, model={"optimizer": "sgd"}),
]  # fmt: skip


def one_process(rank: int, world_size: int, case: Case) -> Trace:
    return trace_one_process(case.problem(), data_size=1, is_dealt=False)


def layouts(rank: int, world_size: int, case: Case) -> list[Trace]:
    return [
        trace_layout(
            case.problem(),
            PipelineParallelStrategy(
                telemetry=False,
                schedule=schedule,
                microbatches=case.microbatches,
                **case.strategy,
            ),
            devices=world_size,
        )
        for schedule in case.schedules
    ]


@pytest.mark.sample("schedules of one chunk")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pipeline_equals_one_process(case: Case) -> None:
    reference = run_ranks(one_process, 1, case)[0]
    ranks = run_ranks(layouts, case.ranks, case)
    assert len(reference.losses) == 5
    assert reference.losses[-1] != reference.losses[0]
    assert reference.validation
    assert reference.predictions
    for traces in ranks:
        for schedule, trace in zip(case.schedules, traces, strict=True):
            found = [
                f"{schedule}: {each}" for each in find_differences(reference, trace, case.tolerance)
            ]
            assert found == []
