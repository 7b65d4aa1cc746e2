"""Losses and logs that are no plain means train in a pipeline as in one process."""

from collections.abc import Callable
from functools import partial

import pytest

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.errors import BoltMeshError
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.masked import MaskedStack, RoutedStack, masked_data
from tests.support.ranks import run_ranks
from tests.support.stack import token_data

pytestmark = pytest.mark.ranks

LOGGED = {
    "train_loss", "perplexity", "accuracy", "share", "hits", "hits_of_python", "worst", "length",
    "root",
}  # fmt: skip


def masked() -> Problem:
    return Problem(
        module=partial(MaskedStack, depth=4, has_scalar=True),
        train=partial(masked_data, 55, 8),
        validation=partial(masked_data, 21, 8),
        steps=3,
        accumulate=2,
        trainer={"accelerator": "cpu", "gradient_clip_val": 0.5},
    )


def routed(*, is_balanced: bool = False) -> Problem:
    return Problem(
        module=partial(RoutedStack, depth=4, is_balanced=is_balanced),
        train=partial(token_data, 35, 7),
        steps=3,
        trainer={"accelerator": "cpu"},
    )


def one_process(rank: int, world_size: int, problem: Callable[[], Problem]) -> Trace:
    return trace_one_process(problem(), data_size=1, is_dealt=False)


def pipeline(
    rank: int, world_size: int, problem: Callable[[], Problem], microbatches: int
) -> Trace | str:
    strategy = PipelineParallelStrategy(telemetry=False, microbatches=microbatches)
    try:
        return trace_layout(problem(), strategy, devices=world_size)
    except BoltMeshError as error:
        return str(error)


@pytest.mark.sample("3")
@pytest.mark.parametrize("microbatches", [3, 4])
def test_masked_tokens_and_their_logs_are_those_of_one_process(microbatches: int) -> None:
    reference = run_ranks(one_process, 1, masked)[0]
    assert set(reference.metrics[0]) >= LOGGED
    for trace in run_ranks(pipeline, 2, masked, microbatches):
        assert find_differences(reference, trace) == []


@pytest.mark.full
def test_scalars_of_layers_count_as_in_one_process() -> None:
    reference = run_ranks(one_process, 1, routed)[0]
    for trace in run_ranks(pipeline, 2, routed, 3):
        assert find_differences(reference, trace) == []


@pytest.mark.full
def test_scalars_that_are_no_means_are_refused_on_all_ranks() -> None:
    told = run_ranks(pipeline, 2, partial(routed, is_balanced=True), 3)
    for each in told:
        assert "Mul multiplies two numbers that are made of the batch" in each
        assert "microbatches=1" in each
        assert "masked.py" in each
