"""When an alert is raised, and when it is over."""

import math
from typing import Any

import msgspec
import pytest

from boltmesh.telemetry.snapshot import AlertThresholds, JobSnapshot, PhaseTime, StepRecord
from boltmesh.tui.alerts.watch import MIN_WINDOWS, WARM_UP, WINDOW, Alert, AlertWatch
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import State, fold
from tests.tui.samples import NOW, job, rank, step

ENOUGH = WARM_UP + (MIN_WINDOWS + 1) * WINDOW


def look(
    snapshot: JobSnapshot, *, at: float = NOW, devices: tuple[DeviceReading, ...] = ()
) -> State:
    return fold(None, Observation(time=at, job=snapshot, devices=devices))


def with_steps(*steps: StepRecord, ranks: int = 1, **changes: Any) -> JobSnapshot:
    return job(ranks=tuple(rank(number, steps=steps) for number in range(ranks)), **changes)


def gpu(**changes: Any) -> DeviceReading:
    fields: dict[str, Any] = {
        "kind": "gpu",
        "ranks": (3, 5),
        "name": "H100",
        "uuid": "GPU-7",
        "memory_total_bytes": 1000,
        "memory_used_bytes": 500,
        "temperature_celsius": 60.0,
    }
    return DeviceReading(**fields | changes)


def shown(alerts: tuple[Alert, ...]) -> list[tuple[str, bool, str]]:
    return [(alert.kind, alert.is_resolved, alert.message) for alert in alerts]


def test_nothing_is_said_of_a_job_that_is_well() -> None:
    watch = AlertWatch()
    for second in range(3):
        assert watch.update(look(job(), at=NOW + second, devices=(gpu(),))) == ()
    assert watch.active == ()


# --- loss


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_raised_once_and_resolved_once(value: float) -> None:
    watch = AlertWatch()
    good = [step(0), step(1)]
    assert watch.update(look(with_steps(*good))) == ()
    broken = [*good, step(2, loss=value)]
    (alert,) = watch.update(look(with_steps(*broken)))
    assert (alert.kind, alert.rank, alert.is_resolved) == ("loss", 0, False)
    assert alert.message == f"loss is {value} at step 3, on rank 0"
    assert (alert.job, alert.name, alert.time) == ("abc123", "sample", NOW)
    worse = [*broken, step(3, loss=value)]
    assert watch.update(look(with_steps(*worse))) == ()
    assert list(watch.active) == [alert]
    (over,) = watch.update(look(with_steps(*worse, step(4))))
    assert shown((over,)) == [("loss", True, "loss is finite again at step 5")]
    assert list(watch.active) == []
    (again,) = watch.update(look(with_steps(*worse, step(4), step(5, loss=value))))
    assert not again.is_resolved


def test_a_broken_step_between_two_looks_is_not_missed() -> None:
    watch = AlertWatch()
    watch.update(look(with_steps(step(0))))
    (alert,) = watch.update(look(with_steps(step(0), step(1, loss=math.nan), step(2))))
    assert "at step 2" in alert.message
    assert shown(watch.update(look(with_steps(step(0), step(1, loss=math.nan), step(2))))) == []
    (over,) = watch.update(look(with_steps(step(2), step(3))))
    assert over.is_resolved


def test_of_steps_before_anybody_watched_only_the_newest_counts() -> None:
    assert AlertWatch().update(look(with_steps(step(0, loss=math.nan), step(1)))) == ()
    (alert,) = AlertWatch().update(look(with_steps(step(0), step(1, loss=math.nan))))
    assert alert.kind == "loss"


def test_ranks_that_break_together_are_one_alert() -> None:
    snapshot = with_steps(step(0, loss=math.nan), ranks=64)
    (alert,) = AlertWatch().update(look(snapshot))
    assert alert.message == "loss is nan at step 1, on 64 ranks"
    assert alert.rank == 0


def test_steps_without_a_loss_say_nothing_of_it() -> None:
    watch = AlertWatch()
    watch.update(look(with_steps(step(0, loss=math.nan))))
    assert watch.update(look(with_steps(step(0, loss=math.nan), step(1, loss=None)))) == ()
    assert len(watch.active) == 1


# --- throughput


def batches(*seconds: float, first: int = 0, **changes: Any) -> list[StepRecord]:
    return [
        step(first + at, seconds=each, end_time=NOW - 1000 + first + at, **changes)
        for at, each in enumerate(seconds)
    ]


def feed(watch: AlertWatch, steps: list[StepRecord], ring: int = 16) -> list[Alert]:
    """Look after each step, through a ring that forgets."""
    alerts: list[Alert] = []
    for end in range(1, len(steps) + 1):
        held = steps[max(0, end - ring) : end]
        snapshot = with_steps(*held, alerts=AlertThresholds(stall_s=None))
        alerts += watch.update(look(snapshot))
    return alerts


def test_a_slower_pace_is_raised_once_and_resolved_when_it_recovers() -> None:
    steps = batches(*[0.5] * (ENOUGH + 10), *[1.25] * 40, *[0.5] * 20)
    raised, over = feed(AlertWatch(), steps)
    assert (raised.kind, raised.is_resolved, raised.rank) == ("throughput", False, 0)
    assert raised.message.startswith("throughput is ")
    assert "median so far 1,024" in raised.message
    assert raised.message.endswith("on rank 0")
    assert over.is_resolved


def test_a_pace_within_the_threshold_raises_nothing() -> None:
    steps = batches(*[0.5] * (ENOUGH + 10), *[0.9] * 40)
    assert feed(AlertWatch(), steps) == []


def test_one_slow_batch_is_no_trend() -> None:
    steps = batches(*[0.5] * (ENOUGH + 10), 60.0, *[0.5] * 30)
    assert feed(AlertWatch(), steps) == []


def test_a_loader_that_gives_in_bursts_is_seen() -> None:
    """Three batches at once and then a long wait: the median batch is as fast as ever."""
    steps = batches(*[0.5] * (ENOUGH + 10), *([0.5, 0.5, 0.5, 5.0] * 10))
    assert [alert.kind for alert in feed(AlertWatch(), steps)] == ["throughput"]


def test_the_warm_up_and_a_short_past_are_not_compared_with() -> None:
    assert feed(AlertWatch(), batches(*[0.1] * WARM_UP, *[2.0] * 200)) == []
    assert feed(AlertWatch(), batches(*[0.5] * (WARM_UP + 2 * WINDOW), *[2.0] * WINDOW)) == []


@pytest.mark.parametrize("pause", ["validation", "checkpoint"])
def test_time_in_validation_and_checkpoints_does_not_count(pause: str) -> None:
    paused = (PhaseTime("forward", 0.5), PhaseTime(pause, 10.0))
    steps = batches(*[0.5] * (ENOUGH + 10))
    steps += batches(*[10.5] * 20, first=len(steps), phases=paused)
    assert feed(AlertWatch(), steps) == []
    steps = steps[: ENOUGH + 10]
    steps += batches(*[10.5] * 20, first=len(steps), phases=(PhaseTime("forward", 10.5),))
    assert [alert.kind for alert in feed(AlertWatch(), steps)] == ["throughput"]


def test_a_slow_stretch_does_not_become_what_is_normal() -> None:
    steps = batches(*[0.5] * (ENOUGH + 10), *[2.0] * 2000)
    watch = AlertWatch()
    (raised,) = feed(watch, steps)
    assert watch.active == (raised,)


def test_longer_batches_are_measured_by_their_tokens() -> None:
    steps = batches(*[0.5] * (ENOUGH + 10))
    steps += batches(*[2.0] * 40, first=len(steps), tokens=2048)
    assert feed(AlertWatch(), steps) == []


def test_attaching_late_learns_the_pace_from_the_ring() -> None:
    steps = batches(*[0.5] * (ENOUGH + 10), *[2.0] * 20)
    (alert,) = AlertWatch().update(look(with_steps(*steps)))
    assert alert.kind == "throughput"


# --- devices


def test_memory_near_its_limit_wavers_without_a_second_alert() -> None:
    watch = AlertWatch()
    messages = []
    for used in (960, 970, 965, 971, 955, 949, 975):
        messages += shown(watch.update(look(job(), devices=(gpu(memory_used_bytes=used),))))
    assert [(kind, over) for kind, over, _ in messages] == [
        ("memory", False),
        ("memory", True),
        ("memory", False),
    ]
    assert messages[0][2] == (
        "memory of the GPU of rank 3, 5 is near its limit: 970 B of 1000 B, 97.0%"
    )


def test_a_hot_device_is_raised_by_itself() -> None:
    watch = AlertWatch()
    cool = gpu(uuid="GPU-8", ranks=(1,))
    hot = gpu(temperature_celsius=91.0)
    (alert,) = watch.update(look(job(), devices=(cool, hot)))
    assert (alert.kind, alert.rank) == ("temperature", 3)
    assert alert.message == "the GPU of rank 3, 5 is hot: 91 C, threshold 90 C"
    hotter = gpu(uuid="GPU-8", ranks=(1,), temperature_celsius=95.0)
    (second,) = watch.update(look(job(), devices=(hotter, hot)))
    assert second.rank == 1
    assert len(watch.active) == 2


def test_a_reading_that_is_missing_changes_nothing() -> None:
    watch = AlertWatch()
    (raised,) = watch.update(look(job(), devices=(gpu(temperature_celsius=95.0),)))
    assert watch.update(look(job(), devices=())) == ()
    assert watch.update(look(job(), devices=(gpu(temperature_celsius=None),))) == ()
    assert watch.active == (raised,)


def test_a_process_is_no_device() -> None:
    process = gpu(kind="process", uuid=None, memory_used_bytes=1000)
    assert AlertWatch().update(look(job(), devices=(process,))) == ()


# --- stall


def still(age_s: float, **changes: Any) -> State:
    steps = (step(0, end_time=NOW - age_s),)
    return look(
        job(
            ranks=(rank(0, steps=steps, phase=changes.pop("phase", "communication")),),
            started=NOW - 5000,
            **changes,
        )
    )


def test_a_job_that_stands_still_is_raised_and_its_next_step_resolves_it() -> None:
    watch = AlertWatch()
    assert watch.update(still(119.0)) == ()
    (raised,) = watch.update(msgspec.structs.replace(still(119.0), time=NOW + 2.0))
    assert raised.message == "no step for 2m 01s since step 10; ranks are in communication"
    assert raised.rank is None
    assert watch.update(msgspec.structs.replace(still(119.0), time=NOW + 5.0)) == ()
    (over,) = watch.update(msgspec.structs.replace(still(-9.0), time=NOW + 10.0))
    assert over.is_resolved
    assert over.message == "training moves on after 2m 08s"


@pytest.mark.parametrize("phase", ["validation", "checkpoint"])
def test_validation_and_checkpoints_are_no_stall_and_begin_the_wait_anew(phase: str) -> None:
    watch = AlertWatch()
    assert watch.update(still(500.0, phase=phase)) == ()
    assert watch.update(still(500.0, phase="forward")) == ()
    later = msgspec.structs.replace(still(500.0, phase="forward"), time=NOW + 121.0)
    assert [alert.kind for alert in watch.update(later)] == ["stall"]


def test_a_first_step_that_never_comes_is_a_stall() -> None:
    snapshot = job(ranks=(rank(0, steps=(), phase=None),), started=NOW - 130, global_step=0)
    (alert,) = AlertWatch().update(look(snapshot))
    assert alert.message == "no step for 2m 10s since the start"


def test_a_clock_that_is_set_back_hides_no_stall() -> None:
    """The newest step ended an hour later than it is now; it counts from the first look."""
    watch = AlertWatch()
    for at in (0.0, 119.0):
        assert watch.update(msgspec.structs.replace(still(-3600.0), time=NOW + at)) == ()
    (alert,) = watch.update(msgspec.structs.replace(still(-3600.0), time=NOW + 121.0))
    assert alert.message == "no step for 2m 01s since step 10; ranks are in communication"
    assert len(watch.update(msgspec.structs.replace(still(-122.0), time=NOW + 123.0))) == 1


def test_a_step_that_only_the_job_tells_of_is_progress() -> None:
    """Ranks of other hosts are known by their step alone."""
    watch = AlertWatch()
    far = rank(0, steps=(), is_summary=True)
    assert watch.update(look(job(ranks=(far,), global_step=1, started=NOW), at=NOW)) == ()
    assert watch.update(look(job(ranks=(far,), global_step=2, started=NOW), at=NOW + 110)) == ()
    assert watch.update(look(job(ranks=(far,), global_step=2, started=NOW), at=NOW + 220)) == ()
    (alert,) = watch.update(look(job(ranks=(far,), global_step=2, started=NOW), at=NOW + 231))
    assert alert.kind == "stall"


# --- the end


def test_a_job_that_crashes_while_watched_is_an_alert() -> None:
    watch = AlertWatch()
    watch.update(look(job()))
    dead = job(
        state="crashed",
        ranks=(rank(0, state="failed"), rank(1, state="dead")),
        cause="rank 1 was killed by SIGKILL.",
    )
    (alert,) = watch.update(look(dead))
    assert (alert.kind, alert.rank) == ("failed", 1)
    assert alert.message == "the job has crashed: rank 1 was killed by SIGKILL."
    assert watch.update(look(dead)) == ()


@pytest.mark.parametrize("state", ["finished", "crashed", "failed"])
def test_a_job_that_was_over_before_is_no_news(state: str) -> None:
    assert AlertWatch().update(look(job(state=state))) == ()


def test_what_was_raised_ends_with_the_job() -> None:
    watch = AlertWatch()
    watch.update(look(job(), devices=(gpu(temperature_celsius=95.0),)))
    (over,) = watch.update(look(job(state="finished")))
    assert shown((over,)) == [("temperature", True, "the job has ended")]


# --- thresholds, and starting afresh


def everything_wrong(thresholds: AlertThresholds) -> State:
    steps = batches(*[0.5] * (ENOUGH + 10), *[5.0] * 20, loss=math.nan)
    snapshot = with_steps(*steps, alerts=thresholds, started=NOW - 2000)
    hot = gpu(temperature_celsius=99.0, memory_used_bytes=999)
    return look(snapshot, devices=(hot,))


def test_every_threshold_can_be_switched_off_alone() -> None:
    on = AlertThresholds()
    kinds = {alert.kind for alert in AlertWatch().update(everything_wrong(on))}
    assert kinds == {"loss", "throughput", "memory", "temperature", "stall"}
    switches: dict[str, dict[str, Any]] = {
        "loss": {"loss_not_finite": False},
        "throughput": {"throughput_drop": None},
        "memory": {"memory_share": None},
        "temperature": {"temperature_celsius": None},
        "stall": {"stall_s": None},
    }
    for kind, off in switches.items():
        state = everything_wrong(msgspec.structs.replace(on, **off))
        assert {alert.kind for alert in AlertWatch().update(state)} == kinds - {kind}
    watch = AlertWatch()
    quiet = AlertThresholds(job_failed=False)
    watch.update(look(job(alerts=quiet)))
    assert watch.update(look(job(state="crashed", alerts=quiet))) == ()


def test_another_job_and_an_earlier_time_start_afresh() -> None:
    broken = with_steps(step(0, loss=math.nan))
    watch = AlertWatch()
    assert len(watch.update(look(broken))) == 1
    assert len(watch.update(look(msgspec.structs.replace(broken, id="other")))) == 1
    assert len(watch.update(look(broken))) == 1
    assert watch.update(look(broken, at=NOW + 1)) == ()
    assert len(watch.update(look(broken, at=NOW - 60))) == 1
    assert len(watch.update(look(msgspec.structs.replace(broken, started=NOW - 9)))) == 1
    assert len(watch.active) == 1


def test_what_a_job_says_of_itself_is_cleaned() -> None:
    watch = AlertWatch()
    watch.update(look(job(name="a\x1b[31m\nb")))
    (alert,) = watch.update(look(job(name="a\x1b[31m\nb", state="failed", cause="x\x00y\n\x9b2J")))
    assert (alert.name + alert.message).isprintable()


def test_a_look_at_a_thousand_ranks_is_cheap() -> None:
    """Once the steps are known a look goes over the new ones only."""
    many = tuple(rank(number, steps=tuple(step(at) for at in range(50))) for number in range(1024))
    watch = AlertWatch()
    state = look(job(ranks=many))
    watch.update(state)
    seen: list[int] = []

    class Counting(tuple[StepRecord, ...]):
        __slots__ = ()

        def __reversed__(self) -> Any:
            for item in tuple.__iter__(self[::-1]):
                seen.append(item.index)
                yield item

    counted = tuple(msgspec.structs.replace(each, steps=Counting(each.steps)) for each in many)
    watch.update(look(job(ranks=counted)))
    assert len(seen) <= 1025
