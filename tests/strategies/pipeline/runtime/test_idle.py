"""The bubble that all ranks know: over the common window, one run late, with clocks that differ."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from boltmesh.strategies.pipeline.runtime import timing
from boltmesh.strategies.pipeline.runtime.timing import FIGURES, BubbleMeter
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def test_idle_time_is_that_of_the_common_window() -> None:
    meter = BubbleMeter(None, CPU)
    meter.take_figures(meter.begin(is_whole=True))
    assert meter.bubble is None  # nothing has run
    meter.measured(meter.number, 100, 200, 75)
    meter.take_figures(meter.begin(is_whole=True))
    assert meter.bubble == pytest.approx(0.25)


def test_of_several_ranks_the_mean_counts_and_no_rank_has_a_window_of_its_own() -> None:
    meter = BubbleMeter(None, CPU)
    meter.begin(is_whole=True)
    meter.measured(1, 0, 1, 1)
    meter.begin(is_whole=True)
    # One rank from 0 to 60, busy for 50; the other one from 40 to 100, busy for 60.
    meter.take_figures([0, 60, 50, 40, 100, 60])
    assert meter.bubble == pytest.approx(1 - (50 + 60) / 200)


def test_runs_without_backward_passes_and_ranks_that_know_nothing_are_left_out() -> None:
    meter = BubbleMeter(None, CPU)
    for is_whole, known in ((True, True), (False, True), (True, False), (True, True)):
        figures = meter.begin(is_whole=is_whole)
        meter.take_figures(figures)
        if known:
            meter.measured(meter.number, 100 * meter.number, 100 * meter.number + 10, meter.number)
        if meter.number in (2, 3, 4):  # nothing newer is known than the first run
            assert meter.bubble == pytest.approx(0.9)
    meter.take_figures(meter.begin(is_whole=False))
    assert meter.bubble == pytest.approx((0.9 + 0.6) / 2)  # of the first and the fourth


def test_a_device_is_asked_two_runs_later() -> None:
    meter = BubbleMeter(None, torch.device("cuda"))
    for number in range(1, 5):
        figures = meter.begin(is_whole=True)
        meter.take_figures(figures)
        assert any(figures) == (number == 4)
        if number == 3:
            meter.measured(1, 10, 20, 5)
    assert meter.bubble == pytest.approx(0.5)


BUSY_S, LASTS_S = 0.1, 0.2


def on_hosts_of_their_own(
    rank: int, world_size: int
) -> tuple[tuple[list[int], float | None], float]:
    """Runs on clocks that are an hour apart from rank to rank, and how long they took in all."""
    timing._clock = lambda: str(rank)
    offset = 3_600_000_000_000 * rank
    true_clock = time.monotonic_ns
    began_ns = true_clock()
    clock: Any = time
    clock.monotonic_ns = lambda: true_clock() + offset
    try:
        group = dist.new_group(list(range(world_size)), backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        meter = BubbleMeter(group, CPU)
        figures: list[int] = []
        for _ in range(3):
            row = torch.tensor(meter.begin(is_whole=True))
            dist.all_reduce(row, group=group)
            figures = row.tolist()
            meter.take_figures(figures)
            dist.barrier()
            start = time.monotonic_ns()
            time.sleep(LASTS_S)
            meter.measured(meter.number, start, time.monotonic_ns(), int(BUSY_S * 1e9))
            dist.barrier()
            meter.note_sync_point()
        return (figures, meter.bubble), (true_clock() - began_ns) / 1e9
    finally:
        clock.monotonic_ns = true_clock


@pytest.mark.ranks
def test_clocks_of_several_hosts_need_not_agree() -> None:
    ((figures, bubble), one_s), (other, other_s) = run_ranks(on_hosts_of_their_own, 2)
    assert other == (figures, bubble)  # all ranks know the same
    assert len(figures) == 2 * FIGURES
    assert bubble is not None
    # 0.5, and more where sleeping took longer: as if it had taken all of the time.
    assert 1 - BUSY_S / LASTS_S <= bubble < 1 - BUSY_S / max(one_s, other_s)
