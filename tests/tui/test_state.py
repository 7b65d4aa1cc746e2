import math

import pytest

from boltmesh.telemetry.snapshot import MetricPoint
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import (
    MAX_POINTS,
    Series,
    State,
    fold,
    fold_loss_of_source,
    metric_names,
)
from tests.tui.samples import NOW, job, losses, rank


def _fold_all(*histories: tuple[MetricPoint, ...]) -> State:
    state = None
    for history in histories:
        state = fold(state, Observation(time=NOW, job=job(history=history)))
    assert state is not None
    return state


def test_what_the_ring_forgets_the_state_remembers() -> None:
    state = _fold_all(losses(5.0, 4.0, 3.0), losses(3.0, 2.0, first=3))
    assert list(state.series["loss"].steps) == [1, 2, 3, 4]
    assert state.series["loss"].values == (5.0, 4.0, 3.0, 2.0)


def test_folding_the_same_observation_again_changes_nothing() -> None:
    once = _fold_all(losses(5.0, 4.0))
    assert _fold_all(losses(5.0, 4.0), losses(5.0, 4.0)) == once


def test_folding_leaves_the_earlier_state_as_it_was() -> None:
    before = _fold_all(losses(5.0))
    fold(before, Observation(time=NOW, job=job(history=losses(5.0, 4.0))))
    assert before.series["loss"].steps == (1,)


def test_another_job_starts_afresh() -> None:
    state = _fold_all(losses(5.0, 4.0))
    other = fold(state, Observation(time=NOW, job=job(id="other", history=losses(9.0))))
    assert other.series["loss"].values == (9.0,)


def test_another_start_under_the_same_id_starts_afresh() -> None:
    """A run dies of a NaN at step 50 and is restarted from step 20."""
    dead = job(
        history=losses(*([2.0] * 49), math.nan),
        trends=(MetricPoint("wall_s", 50, NOW),),
        started=NOW - 100,
    )
    first = fold(None, Observation(NOW, dead))
    assert "loss" in {finding.kind for finding in diagnose(first)}
    resumed = job(
        history=losses(1.0, 0.5, first=21),
        trends=(MetricPoint("wall_s", 22, NOW + 60),),
        started=NOW + 30,
        ranks=(rank(0, last_seen=NOW + 60),),
    )
    again = fold(first, Observation(NOW + 60, resumed))
    assert again.series["loss"] == Series((21, 22), (1.0, 0.5))
    assert again.trends["wall_s"] == Series((22,), (NOW + 60,))
    assert diagnose(again) == ()
    once_more = fold(again, Observation(NOW + 61, resumed))
    assert once_more.series == again.series


def test_the_loss_comes_first_among_the_metrics() -> None:
    points = [MetricPoint(name, 1, 0.0) for name in ("accuracy", "loss", "val_loss")]
    assert metric_names(_fold_all(tuple(points))) == ("loss", "accuracy", "val_loss")


def test_memory_stays_bounded_and_the_newest_points_stay_whole() -> None:
    state = None
    for first in range(1, 20 * MAX_POINTS, 500):
        history = losses(*([1.0] * 500), first=first)
        state = fold(state, Observation(time=NOW, job=job(history=history)))
    assert state is not None
    steps = state.series["loss"].steps
    assert len(steps) <= MAX_POINTS
    assert list(steps) == sorted(set(steps))
    assert steps[0] == 1
    assert steps[-500:] == tuple(range(round(steps[-1]) - 499, round(steps[-1]) + 1))


def test_of_several_points_of_one_step_the_first_is_kept_at_every_look() -> None:
    points = tuple(MetricPoint("loss", 1 + at // 4, float(at)) for at in range(12))
    whole = _fold_all(points)
    grown = _fold_all(*(points[:end] for end in range(1, 13)))
    assert whole.series == grown.series == {"loss": Series((1, 2, 3), (0.0, 4.0, 8.0))}


def test_a_lost_source_keeps_the_last_data_until_it_is_back() -> None:
    state = fold_loss_of_source(_fold_all(losses(5.0)), "gone")
    assert state.lost == "gone"
    assert state.series["loss"].values == (5.0,)
    assert fold(state, Observation(time=NOW, job=job())).lost is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_no_numbers_are_kept(value: float) -> None:
    assert str(_fold_all(losses(value)).series["loss"].values[0]) == str(value)
