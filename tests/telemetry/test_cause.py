"""Which rank took a job down."""

import signal

import pytest

from boltmesh.telemetry.job import RankEnd
from boltmesh.telemetry.reader.cause import Failure, describe_death, is_consequence, job_state
from boltmesh.telemetry.snapshot import CollectiveInFlight, Memory, RankSnapshot

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"


def rank(number, state, **fields):
    values = dict.fromkeys(RankSnapshot.__struct_fields__)
    values |= {
        "rank": number,
        "state": state,
        "phase": "backward",
        "global_step": 12,
        "last_seen": 100.0 + number,
        "memory": Memory(None, None, None, None),
    }
    return RankSnapshot(**{**values, **fields})


def waiting(sequence):
    return CollectiveInFlight(axis="data", operator="allreduce", sequence=sequence, is_done=False)


def failed(number, time, error):
    return Failure(rank(number, "failed"), time, error)


def states(ranks, failures=(), end=None):
    return job_state(ranks, failures, end)


NCCL_LOST = (
    "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely."
)


def test_a_job_is_finished_when_every_rank_is():
    assert states([rank(0, "finished"), rank(1, "finished")]) == ("finished", None)
    assert states([rank(0, "finished"), rank(1, "running")]) == ("running", None)
    assert states([rank(0, "running"), rank(1, "missing")]) == ("running", None)
    assert states([rank(0, "missing")]) == ("running", None)


def test_a_rank_that_is_gone_is_the_cause_of_what_the_others_say():
    dead = rank(1, "dead", in_flight=waiting(88))
    state, cause = states([rank(0, "failed"), dead], [failed(0, 200.0, CLOSED)])
    assert state == "crashed"
    assert cause == (
        "rank 1 is gone without recording an end, in backward after step 12, "
        "inside all_reduce number 88 of the data axis."
    )


def test_what_the_supervisor_saw_is_told():
    end = RankEnd(rank=1, signal=signal.SIGKILL, time=150.0)
    state, cause = states([rank(0, "running"), rank(1, "dead")], (), end)
    assert state == "crashed"
    assert cause is not None
    assert cause.startswith("rank 1 was killed by SIGKILL")


def test_an_earlier_error_is_the_cause_of_a_rank_that_was_ended_because_of_it():
    end = RankEnd(rank=1, signal=signal.SIGKILL, time=210.0)
    failures = [failed(0, 200.0, "ValueError: bad batch")]
    state, cause = states([rank(0, "failed"), rank(1, "dead")], failures, end)
    assert state == "failed"
    assert cause == "rank 0 failed in backward after step 12: ValueError: bad batch"


def test_an_error_after_a_noted_death_is_not_the_cause():
    end = RankEnd(rank=1, signal=signal.SIGSEGV, time=150.0)
    failures = [failed(0, 200.0, "ValueError: half a batch")]
    state, cause = states([rank(0, "failed"), rank(1, "dead")], failures, end)
    assert state == "crashed"
    assert cause is not None
    assert cause.startswith("rank 1 was killed by SIGSEGV")


def test_the_earliest_error_that_is_no_consequence_is_the_cause():
    failures = [failed(0, 1.0, CLOSED), failed(1, 3.0, "KeyError: 'x'"), failed(2, 2.0, "OSError")]
    state, cause = states([each.rank for each in failures], failures)
    assert state == "failed"
    assert cause == "rank 2 failed in backward after step 12: OSError"


def test_consequences_alone_are_told_as_they_are():
    failures = [failed(0, 2.0, CLOSED), failed(1, 1.0, "DistBackendError: NCCL timeout")]
    state, cause = states([each.rank for each in failures], failures)
    assert state == "failed"
    assert cause is not None
    assert "rank 1" in cause


def test_a_job_that_vanished_whole_accuses_nobody():
    state, cause = states([rank(0, "dead"), rank(1, "dead")])
    assert state == "crashed"
    assert cause is not None
    assert cause.startswith("all 2 ranks")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (RankEnd(rank=0, signal=11, time=0.0), "was killed by SIGSEGV"),
        (RankEnd(rank=0, signal=99, time=0.0), "was killed by signal 99"),
        (RankEnd(rank=0, exit_code=3, time=0.0), "left with exit code 3"),
        (RankEnd(rank=0, time=0.0), "is gone"),
    ],
)
def test_a_death_is_put_in_words(end, words):
    assert describe_death(end) == words


def test_errors_of_the_network_are_consequences_and_others_are_not():
    assert is_consequence(CLOSED)
    assert is_consequence("RuntimeError: Timed out waiting 1800000ms for recv")
    assert is_consequence(NCCL_LOST)
    assert not is_consequence("RuntimeError: shape mismatch")
