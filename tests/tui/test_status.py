import math

import pytest

from boltmesh.tui.metrics import status as status_module
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.metrics.status import status
from boltmesh.tui.state import fold_loss_of_source
from tests.tui.samples import NOW, job, losses, rank, state


def _text(snapshot_state: object) -> str:
    found = status(snapshot_state)  # type: ignore[arg-type]
    assert found is not None
    return found.text


def test_nothing_is_said_while_all_is_well() -> None:
    assert status(state(job(history=losses(3.0, 2.0)))) is None


def test_a_job_that_has_not_stepped_is_waited_for() -> None:
    found = status(state(job(ranks=(rank(steps=(), state="starting"),))))
    assert found is not None
    assert (found.level, found.text) == ("muted", "waiting for the first step")


def test_a_finished_job_says_how_long_it_took() -> None:
    assert _text(state(job(state="finished", global_step=1234))) == (
        "finished after 1m 40s at step 1,234"
    )


def test_the_recorded_cause_of_a_crash_is_told() -> None:
    found = status(state(job(state="crashed", cause="rank 1 was killed by SIGKILL.")))
    assert found is not None
    assert (found.level, found.text) == ("bad", "crashed: rank 1 was killed by SIGKILL.")


def test_a_job_whose_ranks_are_started_again_says_so() -> None:
    snapshot = job(state="crashed", cause="rank 1 was killed by SIGKILL.", is_restarting=True)
    found = status(state(snapshot))
    assert found is not None
    expected = ("warn", "crashed, and is started again: rank 1 was killed by SIGKILL.")
    assert (found.level, found.text) == expected


def test_without_a_recorded_cause_the_first_rank_to_go_is_named() -> None:
    ranks = (
        rank(0, state="failed", last_seen=NOW - 1, error="Connection closed"),
        rank(1, state="dead", last_seen=NOW - 5, phase="backward", global_step=41),
        rank(2),
    )
    assert _text(state(job(state="failed", ranks=ranks))) == (
        "failed: rank 1 went first, at step 41 in backward"
    )
    assert "no rank says why" in _text(state(job(state="failed")))


def test_a_stalled_job_names_the_phase_that_differs_first() -> None:
    ranks = [rank(n, phase="communication", last_seen=NOW - 60) for n in range(4)]
    ranks[2] = rank(2, phase="data", last_seen=NOW - 90)
    found = status(state(job(ranks=tuple(ranks))))
    assert found is not None
    assert found.level == "warn"
    assert found.text == (
        "no step for 1m 00s: rank 2 is in data, ranks 0, 1, 3 are in communication"
    )


@pytest.mark.parametrize("silent_s", [0.0, 14.0])
def test_a_job_is_given_time_before_it_counts_as_stalled(silent_s: float) -> None:
    ranks = (rank(0, last_seen=NOW - silent_s),)
    assert status(state(job(ranks=ranks))) is None


def test_a_long_validation_is_no_alarm() -> None:
    ranks = tuple(rank(n, phase="validation", last_seen=NOW - 60) for n in range(2))
    found = status(state(job(ranks=ranks)))
    assert found is not None
    assert (found.level, found.text) == ("muted", "no step for 1m 00s: all ranks are in validation")


def test_a_loss_that_is_no_number_is_told_from_its_first_step_on() -> None:
    history = losses(3.0, math.nan, 2.0, math.nan, math.nan)
    assert _text(state(job(history=history))) == "the loss is nan since step 4"
    assert status(state(job(history=losses(math.nan, 2.0)))) is None


def test_a_job_that_can_no_longer_be_read_says_so() -> None:
    lost = fold_loss_of_source(state(), "job.json is gone")
    assert "job.json is gone" in _text(lost)


def test_a_run_that_was_stopped_does_not_look_as_if_it_had_come_to_its_end() -> None:
    found = status(state(job(state="finished", stop_reason="stopped by Ctrl-C after step 13")))
    assert found is not None
    assert (found.level, found.text) == ("warn", "stopped by Ctrl-C after step 13")


def test_the_rows_of_all_ranks_look_once_whether_the_job_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look goes over all ranks: one a row would cost seconds with a thousand of them."""
    looks: list[float] = []

    def stalled_seconds(_: object, now: float) -> None:
        looks.append(now)

    monkeypatch.setattr(status_module, "stalled_seconds", stalled_seconds)
    assert len(rank_rows(state(job(ranks=tuple(map(rank, range(9))))))) == 9
    assert len(looks) == 1
