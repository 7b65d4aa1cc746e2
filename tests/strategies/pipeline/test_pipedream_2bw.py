"""PipeDream-2BW's overlapping steps, in every size and between batches of any two."""

import itertools
from collections.abc import Iterable

import pytest

from boltmesh.schedule_sim import (
    NOMINAL,
    Slot,
    Timetable,
    carried,
    peak_live_activations,
    peak_live_bytes,
    peaks_by_stage,
    simulate,
    window_of,
)
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.partition.choose import UnitUse, unit_cost
from boltmesh.strategies.pipeline.schedules.actions import RankPrograms, with_messages
from boltmesh.strategies.pipeline.schedules.orders.pipedream_2bw import (
    num_carried,
    overlapped_step,
    pipedream_2bw,
)
from boltmesh.strategies.pipeline.schedules.registry import schedule_table, simulate_ideal

RANKS = range(1, 7)
SIZES = list(itertools.product(range(9), range(9)))
"""Microbatches of the batch before and of this one."""


def microbatches(timetable: Timetable, kind: str) -> list[list[int]]:
    return [
        [each.action.microbatch for each in row if each.action.kind == kind] for row in timetable
    ]


@pytest.mark.parametrize("ranks", RANKS)
def test_each_step_does_what_the_one_before_has_left(ranks: int) -> None:
    for before, now in SIZES:
        check_step(ranks, before, now)


def check_step(ranks: int, before: int, now: int) -> None:
    timetable = overlapped_step(ranks, before, now)
    left, leaves = num_carried(ranks, before), num_carried(ranks, now)
    assert microbatches(timetable, "F") == [list(range(now))] * ranks
    wanted = [list(range(-old, now - new)) for old, new in zip(left, leaves, strict=True)]
    assert microbatches(timetable, "B") == wanted
    for row in timetable:
        assert all(one.end <= other.start for one, other in itertools.pairwise(row))


@pytest.mark.parametrize("rank", range(2))
def test_a_step_is_whole_that_has_as_many_backward_as_forward_passes(rank: int) -> None:
    """The logged bubble ratio is that of whole steps: not of the first one, nor of the last."""
    options = PipelineOptions(schedule="pipedream_2bw", microbatches=4)
    late = RankPrograms(options, 2, rank)
    assert late.of(4).is_whole
    for before, now in ((0, 4), (4, 0), (4, 3), (3, 4)):
        assert not late.asynchronous(before, now).is_whole
    assert not late.of(4).forward_only.is_whole
    prompt = RankPrograms(PipelineOptions(schedule="1f1b", microbatches=4), 2, rank)
    assert prompt.of(4).is_whole
    assert not prompt.of(4).forward_only.is_whole


@pytest.mark.parametrize("ranks", RANKS)
def test_messages_meet_and_are_there_when_they_are_needed(ranks: int) -> None:
    for before, now in SIZES:
        check_messages(ranks, before, now)


def check_messages(ranks: int, before: int, now: int) -> None:
    """Each rank waits until its next action can be: the strictest way to run the lists."""
    rows = [list(row) for row in with_messages(overlapped_step(ranks, before, now))]
    leaves = num_carried(ranks, before)
    here = {  # gradients that came in the step before
        (rank, "B", -each)
        for rank in range(ranks - 1)
        for each in range(leaves[rank + 1] + 1, leaves[rank] + 1)
    }
    done: set[tuple[int, str, int]] = set()
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, row in enumerate(rows):
            if not row:
                continue
            stage, kind, microbatch = row[0]
            if kind.startswith("RECV"):
                continue
            if kind.startswith("SEND"):
                assert (stage, kind[-1], microbatch) in done
                other = stage + (1 if kind == "SEND_F" else -1)
                if rows[other][:1] != [(other, f"RECV_{kind[-1]}", microbatch)]:
                    continue  # until the other one has come
                here.add((other, kind[-1], microbatch))
                rows[other].pop(0)
            else:
                is_end = stage == (0 if kind == "F" else ranks - 1)
                assert is_end or (stage, kind, microbatch) in here, (rank, row[0])
                done.add((stage, kind, microbatch))
            row.pop(0)
            is_moving = True
    assert not any(rows)


@pytest.mark.parametrize("ranks", range(2, 7))
def test_it_waits_less_than_1f1b_and_keeps_half_as_much_again(ranks: int) -> None:
    for count in (2 * ranks, 3 * ranks):
        sizes = {"num_ranks": ranks, "num_microbatches": count}
        late, one = (
            simulate_ideal(schedule_table(name, **sizes)) for name in ("pipedream_2bw", "1f1b")
        )
        assert late.window - 3 * count == ranks - 2
        assert one.window - 3 * count == 3 * (ranks - 1)
        assert late.peak_live_activations[0] == ranks + ranks // 2
        assert late.peak_live_activations[-1] == ranks // 2


@pytest.mark.parametrize("ranks", RANKS)
def test_a_first_step_keeps_no_more_microbatches_than_the_next_ones(ranks: int) -> None:
    for count in range(ranks, 4 * ranks + 1):
        row_peaks = peak_live_activations(pipedream_2bw(ranks, count))
        first = [live_peak(row) for row in overlapped_step(ranks, 0, count)]
        assert all(one <= other for one, other in zip(first, row_peaks, strict=True))


def live_peak(row: Iterable[Slot]) -> int:
    signs = [1 if slot.action.kind == "F" else -1 for slot in row]
    return max(itertools.accumulate(signs))


def test_a_list_between_two_others_is_simulated_as_such() -> None:
    order = pipedream_2bw(2, 4)
    assert order == (
        ("0F0", "0B2", "0F1", "0B3", "0F2", "0B0", "0F3", "0B1"),
        ("1B3", "1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3"),
    )
    assert carried(order) == {(0, 2), (0, 3), (1, 3)}
    timetable = simulate(order, NOMINAL.seconds)
    assert window_of(timetable) == 12
    assert peak_live_activations(order) == [3, 1]
    assert peaks_by_stage(order) == {0: 3, 1: 1}
    assert peak_live_bytes(order[0], [10, 0]) == 30


def test_the_memory_of_a_cut_counts_both_versions() -> None:
    unit = UnitUse("block", 10, 40, 100, is_called=True, trained_bytes=40, kept_bytes=7)
    assert unit_cost(unit).num_bytes == 160  # weights, gradients and Adam's two moments
    assert unit_cost(unit, num_versions=2).num_bytes == 240
