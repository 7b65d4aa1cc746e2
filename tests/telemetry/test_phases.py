"""Time within a step: exclusive, complete, and the exposed communication taken out."""

import time

import pytest

from boltmesh.telemetry.snapshot import PHASES
from boltmesh.telemetry.writer.phases import DATA, OTHER, PhaseClock

MS = 1_000_000


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still until it is moved, in milliseconds."""

    class Now:
        ms = 1000.0

        def __call__(self):
            return int(self.ms * MS)

    clock = Now()
    monkeypatch.setattr(time, "monotonic_ns", clock)
    return clock


def spend(clock, now, phase, ms, inside=lambda: None):
    clock.enter(PHASES.index(phase))
    now.ms += ms
    inside()
    clock.leave()


def shown(step):
    assert sum(step.phases_ns) == step.total_ns
    return {name: ns / MS for name, ns in zip(PHASES, step.phases_ns, strict=True) if ns}


def test_nested_phases_are_exclusive_and_add_up(now):
    clock = PhaseClock()
    clock.restart(DATA)
    now.ms += 5
    spend(clock, now, "transfer", 1)
    clock.rebase(OTHER)
    now.ms += 0.5

    def closure():
        spend(clock, now, "forward", 10)
        spend(clock, now, "backward", 20)

    spend(clock, now, "optimizer", 2, closure)
    now.ms += 0.25
    assert shown(clock.take()) == {
        "data": 5,
        "transfer": 1,
        "forward": 10,
        "backward": 20,
        "optimizer": 2,
        "other": 0.75,
    }
    assert shown(clock.take()) == {}


def test_a_collective_that_the_caller_waits_for_is_exposed(now):
    clock = PhaseClock()

    def reduce():
        clock.note_enqueue(clock_ns(now), is_synchronous=True)
        now.ms += 30
        clock.note_wait(30 * MS)
        now.ms += 4

    spend(clock, now, "forward", 10, reduce)
    assert shown(clock.take()) == {"forward": 14, "communication": 30}


def clock_ns(now):
    return int(now.ms * MS)


def test_the_tail_of_a_backward_pass_is_exposed_and_what_computation_hides_is_not(now):
    clock = PhaseClock()

    def buckets():
        for _ in range(3):
            now.ms += 10  # gradients are computed
            clock.note_enqueue(clock_ns(now), is_synchronous=False)
        now.ms += 7
        clock.note_done(clock_ns(now))
        now.ms += 1  # gradients are copied back

    spend(clock, now, "backward", 2, buckets)
    assert shown(clock.take()) == {"backward": 33, "communication": 7}


def test_a_backward_pass_without_collectives_has_no_tail(now):
    clock = PhaseClock()
    spend(
        clock, now, "backward", 5, lambda: clock.note_enqueue(clock_ns(now), is_synchronous=False)
    )
    assert "communication" not in shown(clock.take())
    spend(clock, now, "backward", 5)
    assert shown(clock.take()) == {"backward": 5}


def test_computation_after_the_last_collective_is_not_communication(now):
    clock = PhaseClock()

    def inside():
        clock.note_enqueue(clock_ns(now), is_synchronous=False)
        now.ms += 3
        clock.note_done(clock_ns(now))
        now.ms += 50

    spend(clock, now, "backward", 10, inside)
    assert shown(clock.take()) == {"backward": 60, "communication": 3}


def test_where_completion_is_unknown_the_tail_lasts_to_the_end_of_the_pass(now):
    clock = PhaseClock()

    def inside():
        clock.note_enqueue(clock_ns(now), is_synchronous=False)
        now.ms += 9

    spend(clock, now, "backward", 10, inside)
    assert shown(clock.take()) == {"backward": 10, "communication": 9}


def test_validation_is_whole_but_for_a_checkpoint(now):
    clock = PhaseClock()

    def inside():
        spend(clock, now, "transfer", 1)
        spend(clock, now, "forward", 2)
        clock.note_wait(2 * MS)
        spend(clock, now, "checkpoint", 8, lambda: spend(clock, now, "transfer", 4))

    spend(clock, now, "validation", 3, inside)
    assert shown(clock.take()) == {"validation": 6, "checkpoint": 12}


def test_a_wait_is_never_longer_than_the_time_that_passed(now):
    clock = PhaseClock()
    spend(clock, now, "forward", 2, lambda: clock.note_wait(100 * MS))
    assert shown(clock.take()) == {"communication": 2}


def test_leaving_more_often_than_entering_does_no_harm(now):
    clock = PhaseClock()
    clock.leave()
    now.ms += 1
    assert shown(clock.take()) == {"other": 1}


def test_a_timeline_sees_every_boundary_once():
    class Timeline:
        def __init__(self):
            self.seen = []

        def mark(self, phase):
            self.seen.append(PHASES[phase])

        def mark_enqueue(self):
            self.seen.append("enqueue")

        def mark_backward_end(self):
            self.seen.append("tail")

    timeline = Timeline()
    clock = PhaseClock(timeline)
    clock.rebase(DATA)
    clock.rebase(OTHER)
    clock.enter(PHASES.index("optimizer"))
    clock.enter(PHASES.index("backward"))
    clock.note_enqueue(1, is_synchronous=False)
    clock.note_enqueue(2, is_synchronous=False)
    clock.leave()
    clock.leave()
    clock.enter(PHASES.index("validation"))
    clock.enter(PHASES.index("forward"))
    clock.leave()
    clock.leave()
    assert timeline.seen == [
        "data",
        "other",
        "optimizer",
        "backward",
        "enqueue",
        "enqueue",
        "tail",
        "optimizer",
        "other",
        "validation",
        "other",
    ]
