"""Losses and logs that are no plain means train in a pipeline as in one process."""

from functools import partial
from typing import Any

import pytest

from boltmesh.differences import Trace, find_differences
from boltmesh.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.masked import MaskedStack, masked_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

LOGGED = {
    "train_loss", "perplexity", "accuracy", "share", "hits", "hits_of_python", "worst", "length",
    "root",
}  # fmt: skip


def problem(options: dict[str, Any]) -> Problem:
    return Problem(
        module=partial(MaskedStack, depth=4, has_scalar=True),
        train=partial(masked_data, 55, 8),
        validation=partial(masked_data, 21, 8),
        prediction=partial(masked_data, 9, 8),
        steps=3,
        accumulate=2,
        trainer={"accelerator": "cpu", "gradient_clip_val": 0.5, **options},
    )


def one_process(rank: int, world_size: int) -> Trace:
    return trace_one_process(problem({}), data_size=1)


def pipeline(rank: int, world_size: int, microbatches: int) -> Trace:
    strategy = PipelineParallelStrategy(telemetry=False, microbatches=microbatches)
    return trace_layout(problem({}), strategy, devices=world_size)


@pytest.mark.parametrize("microbatches", [3, 4])
def test_masked_tokens_and_their_logs_are_those_of_one_process(microbatches: int) -> None:
    reference = run_ranks(one_process, 1)[0]
    assert set(reference.metrics[0]) >= LOGGED
    for trace in run_ranks(pipeline, 2, microbatches, timeout_s=110):
        assert find_differences(reference, trace) == []
