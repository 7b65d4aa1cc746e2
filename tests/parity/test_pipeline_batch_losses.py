"""Losses over the whole batch, or of several views, train in a pipeline as in one process."""

from functools import partial
from typing import Any

import pytest

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.errors import BoltMeshError
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.batch_losses import (
    Balanced,
    Contrastive,
    Criterion,
    Mined,
    Ratio,
    Triplets,
    TwoPasses,
    Views,
    uneven_data,
)
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks

DATA = {
    Contrastive: token_data,
    Criterion: token_data,
    Balanced: token_data,
    Views: token_data,
    TwoPasses: token_data,
    Triplets: token_data,
    Mined: token_data,
    Ratio: uneven_data,
}


def problem(model: type[Stack]) -> Problem:
    return Problem(
        module=model,
        train=partial(DATA[model], 35, 10),
        validation=partial(DATA[model], 9, 5) if model in {Contrastive, Triplets} else None,
        steps=4,
        trainer={"accelerator": "cpu", "gradient_clip_val": 0.7},
    )


class Concatenated(Views):
    """Whose encoder gives two rows for each of the batch."""

    def __init__(self) -> None:
        super().__init__(is_concatenated=True)


DATA[Concatenated] = token_data


def one_process(rank: int, world_size: int, model: type[Stack]) -> Trace:
    return trace_one_process(problem(model), data_size=1, is_dealt=False)


def pipeline(
    rank: int, world_size: int, model: type[Stack], options: dict[str, Any]
) -> Trace | str:
    strategy = PipelineParallelStrategy(**{"telemetry": False, "microbatches": 4, **options})
    try:
        return trace_layout(problem(model), strategy, devices=world_size)
    except BoltMeshError as error:
        return str(error)


@pytest.mark.sample(
    "Contrastive-options2", "TwoPasses-options6", "Triplets-options7", "Criterion-options10"
)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Contrastive, {}),
        (Contrastive, {"schedule": "gpipe", "microbatches": 3}),
        (Contrastive, {"schedule": "looped_bfs"}),
        (Ratio, {"schedule": "gpipe"}),
        (Balanced, {}),
        (Views, {}),
        (TwoPasses, {}),
        (Triplets, {"schedule": "interleaved_1f1b"}),
        (Triplets, {"schedule": "zbv"}),
        (Mined, {}),
        (Criterion, {}),
    ],
)
def test_a_loss_over_the_whole_batch_trains_as_in_one_process(
    model: type[Stack], options: dict[str, Any]
) -> None:
    reference = run_ranks(one_process, 1, model)[0]
    for trace in run_ranks(pipeline, 2, model, options):
        assert find_differences(reference, trace) == []


def test_a_log_of_a_metric_between_views_is_refused_where_another_stage_follows() -> None:
    for error in run_ranks(pipeline, 2, Triplets, {}):
        assert "Microbatches gave different values of __rsub__" in error
        assert "Use microbatches=1" in error


@pytest.mark.sample("Contrastive")
@pytest.mark.parametrize("model", [Contrastive, Ratio, Balanced])
def test_1f1b_refuses_such_a_loss_and_names_the_schedule(model: type[Stack]) -> None:
    for told in run_ranks(pipeline, 2, model, {"schedule": "1f1b"}):
        assert isinstance(told, str)
        assert "use schedule='gpipe'" in told


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"schedule": "gpipe"}])
def test_views_in_place_of_rows_are_refused_with_the_reason(options: dict[str, Any]) -> None:
    for told in run_ranks(pipeline, 2, Concatenated, options):
        assert isinstance(told, str)
        assert "of shape [20, 5, 13] for 10 rows, has no dimension of rows" in told
        assert "Use microbatches=1" in told
