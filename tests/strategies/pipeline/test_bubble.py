"""What schedules cost: the simulation, the formulas of the papers, and what is kept in memory."""

import itertools

import pytest

from boltmesh.errors import ConfigError
from boltmesh.schedule_sim import Action, StageTimes, Timetable
from boltmesh.strategies.pipeline.schedules.registry import (
    closed_form_bubble,
    schedule_table,
    schedules,
    simulate_ideal,
)

TIMES = [
    StageTimes(),
    StageTimes.of(1.0, 2.5),
    StageTimes(1.0, 1.5, 0.5),
    StageTimes(2.0, 1.0, 0.5),
    StageTimes(1.0, 0.5, 1.0),
]
COMPARED = {
    "gpipe": 360, "1f1b": 360, "looped_bfs": 570, "interleaved_1f1b": 470, "zero_bubble": 423,
    "zbv": 42, "dualpipev": 0, "pipedream_2bw": 72,
}  # fmt: skip


@pytest.mark.parametrize("name", schedules())
def test_the_simulation_agrees_with_the_papers_in_every_size(name: str) -> None:
    compared = 0
    for ranks, microbatches, size in itertools.product(range(1, 7), range(1, 13), (1, 2, 3)):
        sizes = {"num_ranks": ranks, "num_microbatches": microbatches, "stages_per_rank": size}
        try:
            table = schedule_table(name, **sizes)
        except ConfigError:
            continue
        for times in TIMES:
            formula = closed_form_bubble(name, **sizes, times=times)
            if formula is not None:
                compared += 1
                bubble = simulate_ideal(table, times.seconds).bubble
                assert bubble == pytest.approx(formula, abs=1e-12), (sizes, times)
    assert compared == COMPARED.get(name, compared)


@pytest.mark.parametrize(
    ("name", "size", "bubble"),
    [
        ("gpipe", 1, 3 / 11),
        ("1f1b", 1, 3 / 11),
        ("looped_bfs", 2, 3 / 19),
        ("interleaved_1f1b", 2, 3 / 19),
        ("zero_bubble", 1, 1 / 9),
        ("zero_bubble", 2, 1 / 17),
        ("zbv", 2, 1 / 17),
        ("dualpipev", 2, 1 / 17),
    ],
)  # fmt: skip
def test_four_ranks_and_eight_microbatches(name: str, size: int, bubble: float) -> None:
    """The numbers of the page on schedules."""
    table = schedule_table(name, num_ranks=4, num_microbatches=8, stages_per_rank=size)
    ideal = simulate_ideal(table)
    assert ideal.bubble == pytest.approx(bubble)
    assert ideal.bubble_of_ideal == pytest.approx(bubble / (1 - bubble))


def own_bubble(timetable: Timetable) -> float:
    """Idle time between a rank's own first start and last end, of the worst rank.

    The zero-bubble paper counts like this: steps of one rank follow each other without a gap where
    the optimizer of each rank begins when that rank is through.
    """
    return max(
        1 - sum(slot.end - slot.start for slot in row) / (row[-1].end - row[0].start)
        for row in timetable
    )


def test_the_zero_bubble_papers_values() -> None:
    """ZB-H1 has a third of the bubble of 1F1B, ZB-V none on a rank's own clock; both its memory."""
    for ranks in range(2, 7):
        count = 2 * ranks
        one, h1, v = (
            simulate_ideal(schedule_table(name, num_ranks=ranks, num_microbatches=count))
            for name in ("1f1b", "zero_bubble", "zbv")
        )
        busy = 3 * count
        assert h1.window - busy == pytest.approx((one.window - busy) / 3)
        assert own_bubble(v.timetable) == pytest.approx(0)
        assert own_bubble(h1.timetable) > 0
        assert max(one.peak_live_activations) == ranks
        assert h1.peak_live_activations == (ranks,) * ranks
        # Stages are half as large, so twice as many are as much.
        assert v.peak_live_activations == (2 * ranks,) * ranks


@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("microbatches", [1, 3, 6, 12])
def test_1f1b_keeps_at_most_the_stages_and_gpipe_all(ranks: int, microbatches: int) -> None:
    one, every = (
        simulate_ideal(schedule_table(name, num_ranks=ranks, num_microbatches=microbatches))
        for name in ("1f1b", "gpipe")
    )
    assert one.peak_live_activations == tuple(
        min(microbatches, ranks - rank) for rank in range(ranks)
    )
    assert every.peak_live_activations == (microbatches,) * ranks


def test_times_may_differ_by_stage() -> None:
    table = schedule_table("1f1b", num_ranks=2, num_microbatches=4)

    def seconds(action: Action) -> float:
        return 3.0 if action.stage == 1 else 1.0

    ideal = simulate_ideal(table, seconds)
    assert ideal.window == 1 + 8 * 3 + 1
    assert ideal.idle_shares == pytest.approx((1 - 8 / 26, 1 - 24 / 26))
