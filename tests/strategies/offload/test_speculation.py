"""A bucket is stepped early only while that is likely to be right."""

import pytest

from boltmesh.strategies.offload.gradient_handler import WARMUP_STEPS, ClipPredictor


def after_warm_up(squares: list[float], max_norm: float | None) -> ClipPredictor:
    forecast = ClipPredictor()
    for _ in range(WARMUP_STEPS):
        for key, square in enumerate(squares):
            forecast.add(key, square)
            assert not forecast.allows(key)
        forecast.finish(norm=sum(squares) ** 0.5, max_norm=max_norm, was_clipped=False)
    return forecast


def allowed(forecast: ClipPredictor, squares: list[float]) -> list[bool]:
    answers = []
    for key, square in enumerate(squares):
        forecast.add(key, square)
        answers.append(forecast.allows(key))
    return answers


def test_nothing_is_guessed_in_the_first_steps() -> None:
    after_warm_up([1.0, 2.0], None)


def test_without_clipping_every_finite_bucket_is_guessed() -> None:
    assert allowed(after_warm_up([1.0, 1.0], None), [9.0, 9.0]) == [True, True]


@pytest.mark.parametrize("square", [float("nan"), float("inf")])
def test_nothing_is_guessed_once_a_gradient_is_not_finite(square: float) -> None:
    assert allowed(after_warm_up([1.0, 1.0, 1.0], None), [1.0, square, 1.0]) == [True, False, False]


def test_nothing_is_guessed_after_a_step_that_was_clipped() -> None:
    forecast = after_warm_up([1.0, 1.0], 2.0)
    forecast.finish(norm=3.0, max_norm=2.0, was_clipped=True)
    assert allowed(forecast, [0.1, 0.1]) == [False, False]


def test_nothing_is_guessed_once_the_sum_is_above_the_limit() -> None:
    assert allowed(after_warm_up([1.0, 1.0, 1.0], 2.0), [1.0, 5.0, 0.1])[1:] == [False, False]


def test_a_large_first_part_foretells_that_the_whole_will_be_clipped() -> None:
    # The first bucket was a tenth of the whole: when it is three times as large, 3 > 2.5.
    squares = [0.1, 0.9]
    assert allowed(after_warm_up(squares, 2.5**0.5), [0.2, 0.9])[0]
    assert not allowed(after_warm_up(squares, 2.5**0.5), [0.3, 0.9])[0]


def test_parts_of_the_other_ranks_count_by_what_they_were() -> None:
    forecast = ClipPredictor()
    for _ in range(WARMUP_STEPS):
        forecast.add(0, 1.0)
        forecast.finish(norm=10.0, max_norm=10.5, was_clipped=False)
    assert allowed(forecast, [1.05]) == [True]
    forecast.forget()
    assert allowed(forecast, [1.2]) == [False]
