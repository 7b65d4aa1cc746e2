"""The figures that screens and summaries share, from snapshots made by hand."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import Event, PhaseTime
from boltmesh.telemetry.stall import recent_step_seconds
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.metrics.step_time import batches_per_step, phase_split
from boltmesh.tui.metrics.traffic import traffic_rows, wire_factor
from boltmesh.tui.panels.events import event_rows
from boltmesh.tui.panels.header import progress
from boltmesh.tui.panels.throughput import throughput_over_time
from tests.tui.samples import NOW, job, rank, state, step, total


def test_the_time_left_follows_from_the_recent_pace() -> None:
    run = progress(state(job(global_step=10, max_steps=100)))
    assert run.left_s == pytest.approx(45.0)
    assert run.fraction == pytest.approx(0.1)
    assert run.elapsed_s == 100


@pytest.mark.parametrize("limit", [None, -1, 0])
def test_without_a_limit_nothing_is_left(limit: int | None) -> None:
    run = progress(state(job(max_steps=limit)))
    assert (run.left_s, run.fraction) == (None, None)


def test_an_ended_job_does_not_grow_older() -> None:
    ended = job(state="finished", updated=NOW - 40)
    assert progress(state(ended, time=NOW + 999)).elapsed_s == 60
    assert progress(state(ended)).left_s is None


def test_accumulated_batches_are_counted() -> None:
    steps = tuple(step(index, global_step=index // 4) for index in range(17))
    assert batches_per_step(job(ranks=(rank(steps=steps),))) == 4
    assert batches_per_step(job(ranks=(rank(steps=()),))) == 1


def test_the_phases_of_a_step_add_up_to_it() -> None:
    named = (PhaseTime("forward", 0.2), PhaseTime("data", 0.1), PhaseTime("new kind", 0.05))
    split = phase_split(job(ranks=(rank(steps=(step(0, phases=named),)),)))
    assert split is not None
    assert [phase.name for phase in split.phases] == ["data", "forward", "other"]
    assert sum(phase.seconds for phase in split.phases) == pytest.approx(split.seconds) == 0.5


def test_only_recent_steps_count() -> None:
    slow_start = (step(0, seconds=99.0), *(step(index) for index in range(1, 40)))
    assert recent_step_seconds(rank(steps=slow_start)) == pytest.approx(0.5)
    assert recent_step_seconds(rank(steps=())) is None
    assert phase_split(job(ranks=(rank(steps=()),))) is None


def test_a_steady_rank_has_a_steady_curve_at_the_rate_of_the_job() -> None:
    curve = throughput_over_time(job(samples_per_second=16.0), "samples", buckets=4)
    assert curve == pytest.approx([16.0] * 4)


def test_a_pause_shows_in_the_curve() -> None:
    steps = tuple(
        step(index, end_time=NOW + index + (30 if index >= 20 else 0)) for index in range(40)
    )
    paused = rank(steps=steps, samples_per_second=4.0)
    curve = throughput_over_time(job(ranks=(paused,)), "samples", buckets=7)
    assert min(curve) < 0.2 * max(curve)


def test_a_curve_needs_steps_and_a_rate() -> None:
    assert throughput_over_time(job(samples_per_second=None), "samples", buckets=5) == []
    assert throughput_over_time(job(ranks=(rank(steps=()),)), "tokens", buckets=5) == []
    still = tuple(step(index, end_time=NOW) for index in range(5))
    assert throughput_over_time(job(ranks=(rank(steps=still),)), "samples", buckets=5) == []


def test_a_gpu_is_joined_to_its_ranks_by_its_uuid_and_a_process_by_its_rank() -> None:
    ranks = (
        rank(0, device="cuda:1 (H100)", device_uuid="GPU-b"),
        rank(1, device="cpu"),
        rank(2, device="cuda:0 (H100)", device_uuid="GPU-lost"),
    )
    devices = (
        DeviceReading(
            kind="gpu", ranks=(0,), name="H100", uuid="GPU-b", utilization_percent=97.0,
            memory_used_bytes=5, memory_total_bytes=10,
        ),
        DeviceReading(kind="process", ranks=(0,), name="h", utilization_percent=1.0),
        DeviceReading(
            kind="process", ranks=(1,), name="h", utilization_percent=180.0,
            memory_used_bytes=7, memory_total_bytes=99,
        ),
    )  # fmt: skip
    rows = rank_rows(msgspec.structs.replace(state(job(ranks=ranks)), devices=devices))
    figures = [
        (row.utilization_percent, row.memory_used_bytes, row.memory_total_bytes) for row in rows
    ]
    assert figures == [(97.0, 5, 10), (180.0, 7, None), (None, None, None)]


def test_without_a_reading_the_ranks_own_memory_is_shown() -> None:
    assert rank_rows(state())[0].memory_used_bytes == 2**30


def _expected(payload: float, operator: str = "allreduce") -> ExpectedTraffic:
    return ExpectedTraffic(
        axis="data", operator=operator, payload_bytes=payload, calls=None, why=""
    )


@pytest.mark.parametrize(
    ("measured", "verdict", "ratio"),
    [(2000.0, "equal", 1.0), (2005.0, "equal", 1.0025), (4000.0, "differs", 2.0),
     (0.0, "differs", 0.0), (None, "pending", None)],
)  # fmt: skip
def test_measured_bytes_are_judged_by_the_expected_ones(
    measured: float | None, verdict: str, ratio: float | None
) -> None:
    ranks = tuple(rank(n, collectives=(total(bytes_per_step=measured),)) for n in range(2))
    (row,) = traffic_rows(job(ranks=ranks, expected=(_expected(2000.0),)))
    assert (row.verdict, row.ratio) == (verdict, ratio)


def test_what_was_expected_and_never_seen_is_missing_and_what_was_not_expected_is_unstated() -> (
    None
):
    ranks = (rank(collectives=(total(operator="broadcast"),)),)
    rows = traffic_rows(job(ranks=ranks, expected=(_expected(9e6),)))
    assert [(row.operator, row.verdict) for row in rows] == [
        ("allreduce", "missing"),
        ("broadcast", "unstated"),
    ]


def test_the_first_steps_are_not_judged() -> None:
    ranks = (rank(collectives=(total(bytes_per_step=9.0),)),)
    early = job(ranks=ranks, expected=(_expected(2000.0),), global_step=2)
    assert traffic_rows(early)[0].verdict == "pending"


def test_what_is_not_counted_is_not_judged() -> None:
    blind = job(expected=(_expected(2000.0),), communication_note="no hook")
    assert traffic_rows(blind)[0].verdict == "pending"


def test_operators_outside_of_steps_are_left_out() -> None:
    setup = total(operator="barrier", calls_per_step=0.0, bytes_per_step=0.0)
    assert traffic_rows(job(ranks=(rank(collectives=(setup,)),))) == []


def test_groups_of_one_axis_add_up_and_ranks_are_averaged() -> None:
    two_groups = (total(group="a"), total(group="b", bytes_per_step=1000.0))
    ranks = (rank(0, collectives=two_groups), rank(1, collectives=(total(bytes_per_step=5000.0),)))
    (row,) = traffic_rows(job(ranks=ranks))
    assert row.payload_bytes == pytest.approx((3000.0 + 5000.0) / 2)


def test_the_outermost_axis_comes_first_and_the_world_last() -> None:
    collectives = (
        total("world"), total("tensor"), total("data", "broadcast", bytes_per_step=9.0),
        total("data"), total("pipeline", "send"),
    )  # fmt: skip
    rows = traffic_rows(job(ranks=(rank(collectives=collectives),)))
    assert [(row.axis, row.operator) for row in rows] == [
        ("pipeline", "send"), ("data", "allreduce"), ("data", "broadcast"),
        ("tensor", "allreduce"), ("world", "allreduce"),
    ]  # fmt: skip


def test_speed_is_that_of_the_wire() -> None:
    timed = total(bytes_per_step=2000.0, seconds_per_step=0.5)
    ranks = tuple(rank(n, collectives=(timed,)) for n in range(4))
    (row,) = traffic_rows(job(ranks=ranks))
    assert row.wire_bytes_per_second == pytest.approx(2000.0 * 2 * 3 / 4 / 0.5)


@pytest.mark.parametrize(
    ("operator", "factor"),
    [("allreduce", 1.5), ("_allgather_base", 0.75), ("reduce_scatter_tensor_coalesced", 0.75),
     ("alltoall_base", 0.75), ("broadcast", 1.0), ("send", 1.0)],
)  # fmt: skip
def test_the_wire_carries_more_or_less_than_the_payload(operator: str, factor: float) -> None:
    assert wire_factor(operator, 4) == pytest.approx(factor)
    assert wire_factor(operator, 1) == 0


def test_an_event_of_many_ranks_is_one_line() -> None:
    events = [Event(NOW + 0.1 * n, n, "validation", "at step 5") for n in range(4)]
    events += [
        Event(NOW + 1, 0, "checkpoint", "x.ckpt"),
        Event(NOW + 900, 0, "validation", "at step 5"),
    ]
    rows = event_rows(tuple(reversed(events)))
    assert [(row.ranks, row.kind) for row in rows] == [
        ((0, 1, 2, 3), "validation"), ((0,), "checkpoint"), ((0,), "validation"),
    ]  # fmt: skip


def test_the_same_rank_saying_the_same_again_is_another_line() -> None:
    events = tuple(Event(NOW + n, 0, "warning", "slow") for n in range(3))
    assert len(event_rows(events)) == 3
