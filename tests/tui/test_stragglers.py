"""Which rank is late, in which phase, and who is not accused."""

import random

import msgspec
import pytest

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.step_time import middle, rank_profiles
from boltmesh.tui.metrics.stragglers import (
    BATCHES_TO_JUDGE,
    LATE_AT_LEAST_S,
    LATE_SHARE,
    Lateness,
    balance,
    lateness,
    stragglers,
)
from boltmesh.tui.panels.context import context_rows
from boltmesh.tui.panels.rank_table import draw_rank_table
from boltmesh.tui.render.style import UNICODE, Style
from tests.tui.loads import HEALTHY, Load, records, steady, team, waiting_for, worker
from tests.tui.samples import job, state

STEP_S = sum(HEALTHY.values())


def _late(snapshot: JobSnapshot) -> list[int]:
    return [found.rank for found in stragglers(snapshot)]


def _only_forward(seconds: float) -> Load:
    return lambda _: {"forward": seconds}


def test_the_late_rank_is_the_one_that_does_not_wait() -> None:
    snapshot = team(*waiting_for(0.05, size=8))
    (found,) = stragglers(snapshot)
    assert (found.rank, found.phase) == (7, "forward")
    assert found.excess_s == pytest.approx(0.05)
    assert found.phase_s - found.phase_peers_s == pytest.approx(0.05)
    assert found.wait_s == pytest.approx(HEALTHY["communication"])
    assert found.peers_wait_s == pytest.approx(HEALTHY["communication"] + 0.05)
    # All steps are of the same length: the length alone would tell nothing.
    assert {round(profile.step_s, 9) for profile in rank_profiles(snapshot).values()} == {0.25}


@pytest.mark.parametrize("phase", ["data", "transfer", "forward", "backward", "optimizer"])
@pytest.mark.parametrize("size", [2, 3, 8, 40])
def test_every_phase_can_be_the_cause_in_a_team_of_any_size(phase: str, size: int) -> None:
    (found,) = stragglers(team(*waiting_for(0.06, size=size, phase=phase)))
    assert (found.rank, found.phase) == (size - 1, phase)


@pytest.mark.parametrize(("share", "is_late"), [(0.9, False), (1.1, True)])
def test_a_rank_is_late_from_a_tenth_of_a_step_on(share: float, *, is_late: bool) -> None:
    # A longer step needs more: late / (step + late) is compared.
    late = share * LATE_SHARE * STEP_S / (1 - share * LATE_SHARE)
    assert bool(_late(team(*waiting_for(late, size=4)))) == is_late


@pytest.mark.parametrize(("late_s", "is_late"), [(0.0009, False), (0.0011, True)])
def test_what_a_busy_host_adds_to_a_tiny_step_is_no_lateness(
    late_s: float, *, is_late: bool
) -> None:
    tiny = 0.002

    def load(extra: float) -> Load:
        return lambda index: {"forward": tiny + extra, "communication": LATE_AT_LEAST_S - extra}

    ranks = tuple(worker(number, load(0.0)) for number in range(3))
    snapshot = job(ranks=(*ranks, worker(3, load(late_s))))
    assert bool(_late(snapshot)) == is_late


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_times_of_an_accumulated_step_are_those_of_all_of_its_batches(
    phase: str, batches: int
) -> None:
    """The optimizer runs, and ranks wait for each other, with the last batch of a step."""
    late_s = 0.1

    def accumulated(number: int) -> RankSnapshot:
        def load(index: int) -> dict[str, float]:
            is_last = (index + 1) % batches == 0
            own = {"data": 0.01, "forward": 0.1, "optimizer": 0.08 * is_last}
            if number == 3:
                own[phase] += late_s * (is_last if phase == "optimizer" else 1 / batches)
            # A rank that is not late waits in the last batch for the one that is.
            return own | {"communication": (0.02 + late_s * (number != 3)) * is_last}

        steps = tuple(
            msgspec.structs.replace(each, global_step=(each.index + 1) // batches)
            for each in records(load, num_steps=43)
        )
        return worker(number, steps=steps, global_step=steps[-1].global_step)

    snapshot = job(ranks=tuple(map(accumulated, range(4))))
    own_s = batches * 0.11 + 0.08
    (found,) = stragglers(snapshot)
    assert (found.rank, found.phase) == (3, phase)
    assert found.excess_s == pytest.approx(late_s)
    assert found.peers_s == pytest.approx(own_s)
    assert found.phase_s - found.phase_peers_s == pytest.approx(late_s)
    assert (found.wait_s, found.peers_wait_s) == pytest.approx((0.02, 0.12))
    assert found.step_s == pytest.approx(own_s + 0.12)
    typical = balance(snapshot)
    assert typical is not None
    assert typical.step_s == pytest.approx(own_s + 0.12)
    assert typical.phases["data"] == pytest.approx(batches * 0.01)
    assert typical.transfer_s == pytest.approx(0.02)
    assert typical.uneven_s == pytest.approx(0.75 * late_s)
    (finding,) = [each for each in diagnose(state(snapshot)) if each.kind == "straggler"]
    assert "100 ms a step late" in finding.headline
    table = draw_rank_table(state(snapshot), 200, 9, Style(UNICODE))
    assert f"{phase} +100 ms" in "".join(line.plain for line in table)
    assert [row.compute_s for row in context_rows(snapshot)] == pytest.approx(
        [own_s] * 3 + [own_s + late_s]
    )
    assert [row.exposed_s for row in context_rows(snapshot)] == pytest.approx([0.12] * 3 + [0.02])


def test_ranks_that_differ_by_nature_are_not_accused_but_one_far_out_is() -> None:
    generator = random.Random(0)

    def wild(extra: float) -> Load:
        return steady(forward=0.06 + extra)

    loads = [wild(generator.uniform(0, 0.15)) for _ in range(32)]
    assert _late(team(*loads)) == []
    assert _late(team(*loads[:-1], wild(0.8))) == [31]


def test_several_late_ranks_do_not_hide_each_other() -> None:
    loads = [steady()] * 5 + [steady(forward=0.16), steady(forward=0.12)]
    assert _late(team(*loads)) == [5, 6]


def test_waiting_is_never_the_cause() -> None:
    loads = [steady()] * 4 + [steady(communication=0.3, forward=0.12)]
    (found,) = stragglers(team(*loads))
    assert (found.rank, found.phase) == (4, "forward")


def test_a_rank_that_is_ahead_is_not_late() -> None:
    assert _late(team(*[steady()] * 5, steady(forward=0.001))) == []


def test_one_odd_step_makes_nobody_late() -> None:
    def odd(index: int) -> dict[str, float]:
        return HEALTHY | ({"other": 3.0} if index == 15 else {})

    assert _late(team(*[steady()] * 3, odd)) == []


def test_warm_up_validation_and_checkpoints_are_not_judged() -> None:
    def busy(index: int) -> dict[str, float]:
        if index < 3:
            return HEALTHY | {"forward": 30.0}
        if index % 2:
            return HEALTHY | {"validation": 5.0, "forward": 4.0}
        return HEALTHY | ({"checkpoint": 9.0, "forward": 9.0} if index % 4 else {})

    snapshot = team(*[steady()] * 3, busy)
    assert _late(snapshot) == []
    assert rank_profiles(snapshot)[3].step_s == pytest.approx(STEP_S)


@pytest.mark.parametrize(("extra", "is_judged"), [(-1, False), (0, True)])
def test_few_steps_are_not_judged(extra: int, *, is_judged: bool) -> None:
    num_steps = 3 + BATCHES_TO_JUDGE + extra
    loads = waiting_for(0.1, size=4)
    ranks = tuple(
        worker(number, steps=records(load, num_steps=num_steps))
        for number, load in enumerate(loads)
    )
    assert bool(lateness(job(ranks=ranks))) == is_judged


def test_ranks_of_different_stages_are_not_compared() -> None:
    ranks = tuple(
        worker(
            number,
            steady(forward=0.06 if number < 4 else 0.3),
            coordinates={"pipeline": number // 4, "data": number % 4, "tensor": 0},
        )
        for number in range(8)
    )
    snapshot = job(ranks=ranks, mesh={"pipeline": 2, "data": 4, "tensor": 1})
    assert _late(snapshot) == []
    alone = job(ranks=(ranks[0], ranks[4]), mesh={"pipeline": 2, "data": 1, "tensor": 1})
    assert lateness(alone) == {}


def test_ranks_without_records_are_left_out() -> None:
    missing = worker(3, steps=(), global_step=0, state="missing", coordinates={})
    ranks = tuple(worker(number, load) for number, load in enumerate(waiting_for(0.1, size=3)))
    assert _late(job(ranks=(*ranks, missing))) == [2]
    assert lateness(job(ranks=(missing,))) == {}
    assert lateness(job(ranks=())) == {}


def test_the_median_of_the_others_is_right_for_any_numbers() -> None:
    generator = random.Random(3)
    for _ in range(200):
        count = generator.randint(2, 12)
        own = [generator.choice([0.1, 0.1, 0.2, generator.random()]) for _ in range(count)]
        found = lateness(team(*map(_only_forward, own)))
        for place in range(count):
            others = own[:place] + own[place + 1 :]
            assert found[place].peers_s == pytest.approx(middle(others))


def test_shares_of_nothing_are_nothing() -> None:
    snapshot = team(steady(), steady())
    found = msgspec.structs.replace(lateness(snapshot)[0], peers_s=0.0)
    assert isinstance(found, Lateness)
    assert found.share == 0


def test_a_thousand_ranks_give_up_steps_not_ranks() -> None:
    few = rank_profiles(team(*[steady()] * 8))
    ranks = tuple(worker(0, rank=number) for number in range(1024))
    many = rank_profiles(job(ranks=ranks))
    assert len(many) == 1024
    assert many[0].num_batches < few[0].num_batches


def test_the_same_object_is_figured_out_once() -> None:
    calls: list[list[int]] = []

    @remember_last
    def total(values: list[int]) -> int:
        calls.append(values)
        return sum(values)

    first, second = [1, 2], [1, 2]
    assert total(first) == total(first) == 3
    assert len(calls) == 1
    assert total(second) == 3
    assert len(calls) == 2
