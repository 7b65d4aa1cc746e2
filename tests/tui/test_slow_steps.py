"""Steps that took much longer than the others, and what held them up."""

from collections.abc import Callable

import msgspec
import pytest

from boltmesh.telemetry.snapshot import PHASES, JobSnapshot, PhaseTime, StepRecord
from boltmesh.tui.panels.events import MAX_SLOW_STEPS, SlowStep, slow_steps
from tests.tui.samples import NOW, job, rank, step

USUAL = {"data": 0.01, "forward": 0.15, "backward": 0.25, "communication": 0.05, "optimizer": 0.04}


def _record(index: int, extra: dict[str, float], *, batches: int = 1) -> StepRecord:
    times = dict.fromkeys(PHASES, 0.0) | USUAL
    for name, seconds in extra.items():
        times[name] += seconds
    return step(
        index,
        global_step=(index + 1) // batches,
        seconds=sum(times.values()),
        end_time=NOW - 500 + index,
        phases=tuple(PhaseTime(name, seconds) for name, seconds in times.items()),
    )


def _job(
    extra: Callable[[int, int], dict[str, float]], *, num_ranks: int = 4, num_steps: int = 60
) -> JobSnapshot:
    """``extra`` says what the phases of a rank take longer in a batch."""
    return job(
        ranks=tuple(
            rank(n, steps=tuple(_record(index, extra(n, index)) for index in range(num_steps)))
            for n in range(num_ranks)
        )
    )


def _wait_for(culprit: int, phase: str, seconds: float = 1.0, *, at: int = 40) -> JobSnapshot:
    def extra(number: int, index: int) -> dict[str, float]:
        if index != at:
            return {}
        return {phase if number == culprit else "communication": seconds}

    return _job(extra)


def _only(snapshot: JobSnapshot) -> SlowStep:
    (found,) = slow_steps(snapshot)
    return found


@pytest.mark.parametrize("culprit", range(4))
def test_the_rank_that_the_others_waited_for_is_named_with_its_phase(culprit: int) -> None:
    found = _only(_wait_for(culprit, "data"))
    assert (found.global_step, found.rank, found.phase) == (41, culprit, "data")
    assert found.seconds == pytest.approx(1.5)
    assert found.median_s == pytest.approx(0.5)
    assert found.excess_s == pytest.approx(1.0)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_culprit_among_few_ranks_is_found(num_ranks: int) -> None:
    def extra(number: int, index: int) -> dict[str, float]:
        return {"forward" if number == 1 else "communication": 2.0} if index == 20 else {}

    found = _only(_job(extra, num_ranks=num_ranks))
    assert (found.rank, found.phase) == (1, "forward")


def test_a_culprit_among_a_thousand_is_found() -> None:
    def extra(number: int, index: int) -> dict[str, float]:
        return {"forward" if number == 777 else "communication": 2.0} if index == 20 else {}

    found = _only(_job(extra, num_ranks=1000, num_steps=30))
    assert (found.rank, found.phase) == (777, "forward")


def test_no_rank_is_named_where_all_were_slow() -> None:
    found = _only(_job(lambda _, index: {"optimizer": 1.0} if index == 30 else {}))
    assert (found.rank, found.phase) == (None, "optimizer")


def test_no_phase_is_named_where_none_stands_out() -> None:
    spread = {"data": 0.4, "forward": 0.4, "backward": 0.4}
    found = _only(_job(lambda _, index: spread if index == 30 else {}))
    assert (found.rank, found.phase) == (None, None)


def test_a_steady_job_and_one_whose_steps_all_differ_have_no_slow_step() -> None:
    assert slow_steps(_job(lambda _, __: {})) == ()
    uneven = (0.0, 0.5, 1.5, 4.0)  # one in four takes more than twice the median
    assert slow_steps(_job(lambda _, index: {"forward": uneven[index % 4]})) == ()
    little = _job(lambda _, index: {"forward": 0.4} if index == 30 else {})
    assert slow_steps(little) == ()
    assert slow_steps(job(ranks=())) == ()
    assert slow_steps(job(ranks=(rank(steps=()),))) == ()


@pytest.mark.parametrize("phase", ["validation", "checkpoint"])
def test_validation_and_checkpoints_make_no_step_slow(phase: str) -> None:
    assert slow_steps(_job(lambda _, index: {phase: 9.0} if index % 20 == 19 else {})) == ()


def test_the_first_batches_of_a_run_are_not_judged() -> None:
    assert slow_steps(_job(lambda _, index: {"forward": 9.0} if index < 3 else {})) == ()


def test_the_batch_that_ends_an_accumulated_step_is_compared_with_its_like() -> None:
    def records(slow: int | None) -> JobSnapshot:
        steps = tuple(
            _record(
                index,
                {"backward": 0.8} if index % 4 == 3 else {} if index != slow else {"data": 2.0},
                batches=4,
            )
            for index in range(80)
        )
        return job(ranks=(rank(steps=steps),))

    assert slow_steps(records(None)) == ()
    found = _only(records(42))
    assert (found.index, found.rank, found.phase) == (42, None, "data")
    assert found.median_s == pytest.approx(0.5)


def test_the_newest_of_many_are_kept() -> None:
    found = slow_steps(_job(lambda _, index: {"data": 5.0} if index % 5 == 4 else {}))
    assert len(found) == MAX_SLOW_STEPS
    assert [each.index for each in found] == list(range(24, 60, 5))


def test_ranks_that_begin_or_end_elsewhere_are_compared_by_the_batch() -> None:
    snapshot = _wait_for(2, "forward")
    shifted = tuple(
        msgspec.structs.replace(each, steps=each.steps[each.rank * 3 : 55 - each.rank])
        for each in snapshot.ranks
    )
    torn = msgspec.structs.replace(shifted[2], steps=shifted[2].steps[:5] + shifted[2].steps[8:])
    ranks = (*shifted[:2], torn, shifted[3])
    found = _only(msgspec.structs.replace(snapshot, ranks=ranks))
    assert (found.rank, found.phase) == (2, "forward")


def test_a_writer_with_other_phases_is_understood() -> None:
    snapshot = _wait_for(1, "data")
    ranks = tuple(
        msgspec.structs.replace(
            each,
            steps=tuple(
                msgspec.structs.replace(item, phases=item.phases[::-1][2:]) for item in each.steps
            ),
        )
        for each in snapshot.ranks
    )
    found = _only(msgspec.structs.replace(snapshot, ranks=ranks))
    assert (found.rank, found.phase) == (1, "data")


def test_the_longest_of_many_stays_however_many_shorter_ones_follow() -> None:
    found = slow_steps(
        _job(lambda _, index: {"data": 60.0 if index == 9 else 5.0} if index % 5 == 4 else {})
    )
    assert len(found) == MAX_SLOW_STEPS
    assert max(found, key=lambda step: step.seconds).index == 9
