import math

import pytest

from boltmesh.tui import units


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1.00 kB"), (8_404_992, "8.40 MB"), (26.2e6, "26.2 MB"),
     (498e6, "498 MB"), (999.7e6, "1.00 GB"), (3e15, "3000 TB")],
)  # fmt: skip
def test_traffic_is_decimal_with_three_figures(value: float, text: str) -> None:
    assert units.traffic(value) == text


def test_memory_is_binary() -> None:
    assert units.memory(61.2 * 2**30) == "61.2 GiB"
    assert units.memory(1023) == "1023 B"
    assert units.memory(1024) == "1.00 KiB"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-5, "0.01 ms"), (0.0004, "0.40 ms"), (0.0125, "12.5 ms"), (0.2123, "212 ms"),
     (0.9996, "1.00 s"), (1.24, "1.24 s"), (50, "50.0 s"), (99.96, "1m 39s")],
)  # fmt: skip
def test_short_times_change_their_unit_before_they_grow_long(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0s"), (-3, "0s"), (59.9, "59s"), (60, "1m 00s"), (3599, "59m 59s"), (3840, "1h 04m"),
     (3 * 86400 + 7200, "3d 02h")],
)  # fmt: skip
def test_durations_have_two_units_at_most(value: float, text: str) -> None:
    assert units.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.41371, "2.4137"), (10.98765, "10.988"), (0.0123, "0.0123"), (3e-4, "0.0003"),
     (1.5e-7, "1.5e-07"), (12_345.6, "1.23e+04"), (0, "0"), (-0.5, "-0.5000"),
     (math.nan, "nan"), (math.inf, "inf")],
)  # fmt: skip
def test_metrics_of_any_size_stay_short(value: float, text: str) -> None:
    assert units.number(value) == text
    assert len(units.number(value)) <= 9


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.214, "3.21"), (41.23, "41.2"), (412.4, "412"), (28_900, "28,900"), (1.24e6, "1.24 M")],
)
def test_rates(value: float, text: str) -> None:
    assert units.rate(value) == text


def test_what_is_unknown_is_never_shown_as_zero() -> None:
    for write in (units.count, units.rate, units.traffic, units.memory, units.percent,
                  units.seconds, units.duration, units.number):  # fmt: skip
        assert write(None) == "-"
        assert write(0) != "-"


def test_axes_of_size_one_are_left_out_of_the_mesh() -> None:
    assert units.mesh({"pipeline": 2, "data": 1, "tensor": 4}, 8) == "pipeline 2 x tensor 4"
    assert units.mesh({"pipeline": 1, "data": 1, "tensor": 1}, 1) == "1 rank"
    assert units.mesh({}, 3) == "3 ranks"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([5], "rank 5"), ([1, 5], "ranks 1, 5"), ([0, 1, 2, 3], "ranks 0-3"), ([0, 1], "ranks 0, 1"),
     ([3, 1, 2, 8, 8], "ranks 1-3, 8"), (range(0, 20, 2), "10 ranks"), ([], "0 ranks")],
)  # fmt: skip
def test_ranks_are_named_by_their_runs(numbers: list[int], text: str) -> None:
    assert units.ranks(numbers) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0 FLOP/s"), (4.12e14, "412 TFLOP/s"), (2.18e15, "2.18 PFLOP/s")],
)
def test_operations_a_second_have_decimal_units(value: float | None, text: str) -> None:
    assert units.flops(value) == text
