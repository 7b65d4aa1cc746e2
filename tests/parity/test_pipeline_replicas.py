"""Several pipelines, each with batches of its own, compute what one process computes of all."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from boltmesh.check.differences import Tolerance, Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from tests.support.pipelines import ShardedPipeline, pipeline
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STAGES = 2
CLIP = {"gradient_clip_val": 0.5}
ROUGH = Tolerance(relative=2e-2, parameters=2e-2, optimizer=5e-2)
"""Of gradients that are added up in bf16: microbatches are added in another order."""


@dataclass(frozen=True)
class Case:
    """One combination of what a user may ask for."""

    name: str
    schedules: tuple[str, ...] = ("1f1b",)
    count: int = 88
    accumulate: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    tolerance: Tolerance = field(default_factory=Tolerance)

    def problem(self) -> Problem:
        return Problem(
            module=partial(Stack, depth=4, **self.model),
            train=partial(token_data, self.count, 8, shuffle=True),
            validation=partial(token_data, 21, 8),
            prediction=partial(token_data, 19, 8),
            steps=5,
            accumulate=self.accumulate,
            trainer={"accelerator": "cpu", **self.trainer},
        )


CASES = [
    Case("tied weights, clipping, an odd epoch", schedules=("1f1b", "zbv"), count=43,
         model={"ties": True, "has_scalar": True}, trainer=CLIP),
    Case("accumulation, groups, frozen layers", schedules=("interleaved_1f1b",), accumulate=3,
         model={"groups": True, "freezes": True, "ties": True}, trainer=CLIP),
    Case("bf16-mixed", tolerance=ROUGH, model={"optimizer": "sgd", "ties": True},
         trainer={"precision": "bf16-mixed"}),
]  # fmt: skip


THREE = Case("tied weights, whose averages are sums of three", model={"ties": True}, trainer=CLIP)


def one_process(rank: int, world_size: int, cases: list[Case], replicas: int) -> list[Trace]:
    return [trace_one_process(each.problem(), data_size=replicas) for each in cases]


def layouts(
    rank: int, world_size: int, cases: list[Case], door: Any, stages: int
) -> list[list[Trace]]:
    return [
        [
            trace_layout(
                case.problem(),
                door(schedule=schedule, stages=stages),
                devices=world_size,
            )
            for schedule in case.schedules
        ]
        for case in cases
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("door", "cases", "replicas", "stages"),
    [
        (pipeline, CASES, 2, STAGES),
        (pipeline, [THREE], 3, STAGES),
        (pipeline, [THREE], 2, 1),
        (ShardedPipeline, CASES, 2, STAGES),
        (partial(ShardedPipeline, zero_stage=2), CASES[1:2], 2, STAGES),
        (partial(ShardedPipeline, zero_stage=3), CASES[1:2], 2, STAGES),
    ],
    ids=["2 replicas", "3 replicas", "of one rank each", "stage 1", "stage 2", "stage 3"],
)
def test_pipelines_equal_one_process(
    door: Any, cases: list[Case], replicas: int, stages: int
) -> None:
    references = run_ranks(one_process, 1, cases, replicas)[0]
    ranks = run_ranks(layouts, stages * replicas, cases, door, stages)
    for number, (case, reference) in enumerate(zip(cases, references, strict=True)):
        assert len(reference.losses) == 5
        assert reference.losses[-1] != reference.losses[0]
        assert reference.validation
        assert reference.predictions
        for traces in ranks:
            for schedule, trace in zip(case.schedules, traces[number], strict=True):
                found = [
                    f"{case.name}, {schedule}: {each}"
                    for each in find_differences(reference, trace, case.tolerance)
                ]
                assert found == []
