"""When a job counts as stalled or stopped, from a snapshot and from a list of jobs."""

import time

import pytest

from boltmesh.telemetry.reader.cause import Failure, job_state, stop_reason
from boltmesh.telemetry.reader.reader import list_jobs, open_job
from boltmesh.telemetry.snapshot import Event
from boltmesh.telemetry.stall import stalled_seconds
from tests.support.ranks import run_ranks
from tests.telemetry.test_callback import Model, loader, look, trainer
from tests.telemetry.test_reader import (
    FINISHED,
    RUNNING,
    make_job,
    make_rank,
    snapshot,
    write_status,
    write_step,
)
from tests.tui.samples import NOW, job, rank, step

LONG_STEPS = tuple(step(index, seconds=6.0) for index in range(4))
SLOW_OPTIMIZER = tuple(
    step(index, global_step=(index + 1) // 24, seconds=20.0 if index % 24 == 23 else 0.5)
    for index in range(47)
)
"""The optimizer steps every 24 batches, and takes 20 s."""


@pytest.mark.parametrize(
    ("changes", "silent_s", "is_stalled"),
    [
        ({}, 14.0, False),
        ({}, 16.0, True),
        ({"steps": LONG_STEPS}, 59.0, False),
        ({"steps": LONG_STEPS}, 61.0, True),
        ({"steps": SLOW_OPTIMIZER}, 59.0, False),
        ({"steps": SLOW_OPTIMIZER}, 61.0, True),
        ({"steps": SLOW_OPTIMIZER[:24]}, 61.0, True),
        ({"steps": SLOW_OPTIMIZER[:23]}, 61.0, False),  # the first step is not yet complete
        ({"phase": "validation"}, 599.0, False),
        ({"phase": "checkpoint"}, 601.0, True),
        ({"steps": (), "state": "starting"}, 599.0, False),
        ({"steps": (), "state": "starting"}, 601.0, True),
        ({"state": "finished"}, 9e3, False),
    ],
)
def test_a_job_is_stalled_after_ten_steps_or_later_in_phases_that_take_long(
    changes, silent_s, is_stalled
):
    ranks = tuple(rank(number, last_seen=NOW - silent_s, **changes) for number in range(2))
    found = stalled_seconds(job(ranks=ranks), NOW)
    assert found == (pytest.approx(silent_s) if is_stalled else None)


def test_a_rank_that_waits_for_one_that_takes_long_has_its_limit():
    def found(*phases):
        ranks = (rank(at, last_seen=NOW - 60, phase=phase) for at, phase in enumerate(phases))
        return stalled_seconds(job(ranks=tuple(ranks)), NOW)

    assert found("checkpoint", "communication") is None
    assert found("checkpoint", "data") == 60
    assert found("communication", "communication") == 60


def test_one_rank_that_records_anything_is_progress_and_an_ended_job_is_not_stalled():
    ranks = (rank(0, last_seen=NOW - 90), rank(1))
    assert stalled_seconds(job(ranks=ranks), NOW) is None
    silent = (rank(0, last_seen=NOW - 90),)
    assert stalled_seconds(job(ranks=silent, state="crashed"), NOW) is None


def test_the_list_of_jobs_says_which_is_stalled(monkeypatch):
    file = make_rank(make_job())
    for number in range(3):
        write_step(file, number)
    assert (list_jobs()[0].state, list_jobs()[0].stalled_s) == ("running", None)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 40)
    assert list_jobs()[0].stalled_s == pytest.approx(40, abs=10)
    file.close()


def test_a_clock_that_is_set_back_hides_no_stall(monkeypatch):
    clock = time.time
    path = make_job()
    monkeypatch.setattr(time, "time", lambda: clock() + 3600)
    file = make_rank(path)
    data, reduce = file.group_number("1", "data"), file.operator_number("allreduce")
    file.write_facts({"coordinates": {"data": 0}})
    with open_job() as job:
        job.snapshot()
        monkeypatch.setattr(time, "time", clock)
        # The wall clock of a collective is reckoned from that at the start.
        file.enqueue(1, data, reduce, 3, 0, 100)
        assert stalled_seconds(job.snapshot(), time.time()) is None
        write_step(file, 0)
        write_step(file, 1)
        write_status(file, RUNNING, 2)
        monkeypatch.setattr(time, "time", lambda: clock() + 40)
        assert stalled_seconds(job.snapshot(), time.time()) == pytest.approx(40, abs=10)
    assert list_jobs()[0].stalled_s == pytest.approx(40, abs=10)
    file.close()


def test_a_stopped_job_has_its_reason_and_is_stopped_in_the_list():
    file = make_rank(make_job(), state=FINISHED)
    file.event("end", "stopped by SIGTERM after step 82")
    file.event("end", "finished")
    seen = snapshot()
    assert (seen.state, seen.stop_reason) == ("finished", "stopped by SIGTERM after step 82")
    assert list_jobs()[0].stopped
    file.close()


def test_a_job_that_came_to_its_end_is_not_stopped():
    file = make_rank(make_job(), state=FINISHED)
    file.event("end", "finished")
    assert snapshot().stop_reason is None
    assert not list_jobs()[0].stopped
    file.close()


def test_a_script_that_sigterm_ends_is_stopped_and_not_failed():
    def failures(*errors):
        return [Failure(rank(at, state="failed"), NOW, error) for at, error in enumerate(errors)]

    told = failures("SIGTERMException: 143", "SIGTERMException: 143")
    ranks = [each.rank for each in told]
    assert job_state(ranks, told, None) == ("finished", None)
    assert stop_reason((), told) == "stopped by SIGTERM after step 10"
    lost = failures("SIGTERMException: 143", "ValueError: no")
    assert job_state(ranks, lost, None)[0] == "failed"
    dead = [rank(0, state="dead"), rank(1, state="failed")]
    assert job_state(dead, told[1:], None)[0] == "crashed"


def test_the_newest_reason_counts():
    events = [Event(NOW + at, 0, "end", f"stopped by max_time after step {at}") for at in (1, 2)]
    assert stop_reason(events, ()) == "stopped by max_time after step 2"


def max_time_worker(rank, world_size):
    fit = trainer(max_epochs=-1, max_time={"seconds": 1}, limit_val_batches=0)
    fit.fit(Model(), loader())
    stopped = look()
    return stopped, fit.global_step


@pytest.mark.full
@pytest.mark.ranks
def test_max_time_is_why_a_run_was_stopped():
    (seen, global_step), *_ = run_ranks(max_time_worker, 2)
    assert seen.state == "finished"
    assert seen.stop_reason == f"stopped by max_time after step {global_step}"


def full_worker(rank, world_size):
    fit = trainer(max_steps=3, max_time={"hours": 1}, limit_val_batches=0)
    fit.fit(Model(), loader())
    return look()


@pytest.mark.full
@pytest.mark.ranks
def test_a_run_that_does_all_its_steps_in_time_was_not_stopped():
    assert run_ranks(full_worker, 2)[0].stop_reason is None
