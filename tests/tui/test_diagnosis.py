"""What is called wrong, with which numbers, and what is left alone."""

import math
import random
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len

from boltmesh.telemetry.snapshot import (
    CollectiveInFlight,
    Event,
    GroupProgress,
    JobSnapshot,
    Memory,
    MemoryKind,
)
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.findings.finding import Finding
from boltmesh.tui.metrics.findings.limits import DEVICE_NEARLY_FULL, HOST_NEARLY_FULL
from boltmesh.tui.metrics.findings.waits import (
    COMMUNICATION_SHARE,
    INPUT_SHARE,
    OFFLOAD_SHARE,
    UNEVEN_SHARE,
)
from boltmesh.tui.panels.diagnosis import diagnosis_lines, draw_diagnosis
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.state import State, fold_loss_of_source
from tests.tui.loads import HEALTHY, Load, records, steady, team, waiting_for, worker
from tests.tui.samples import NOW, crashed_demo, demo, job, losses, rank, state, step, total

LOOK = Style(UNICODE)
STEP_S = sum(HEALTHY.values())


def _findings(snapshot: JobSnapshot, *devices: DeviceReading, **changes: Any) -> dict[str, Finding]:
    shown = msgspec.structs.replace(state(snapshot, **changes), devices=devices)
    return {finding.kind: finding for finding in diagnose(shown)}


def _with_share(name: str, share: float) -> Load:
    """A step in which one phase takes ``share`` of it."""
    rest = STEP_S - HEALTHY[name]
    return steady(**{name: rest * share / (1 - share)})


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_healthy_job_gives_no_finding(size: int) -> None:
    assert _findings(team(*[steady()] * size)) == {}


def test_noise_gives_no_finding() -> None:
    generator = random.Random(4)

    def noisy(_: int) -> dict[str, float]:
        own = {name: seconds * generator.gauss(1, 0.03) for name, seconds in HEALTHY.items()}
        return own | {"communication": max(0.0, STEP_S + 0.02 - sum(own.values()))}

    for size in (2, 8, 64):
        assert _findings(team(*[noisy] * size)) == {}


def test_before_the_first_steps_and_after_the_end_there_is_nothing_to_find() -> None:
    assert _findings(job(ranks=())) == {}
    assert _findings(job(ranks=(rank(steps=()),))) == {}
    slow = team(*[_with_share("data", 0.6)] * 2)
    assert _findings(msgspec.structs.replace(slow, state="finished")) == {}
    assert set(_findings(slow)) == {"input"}


def test_few_steps_and_steps_that_validate_are_no_ground() -> None:
    load = _with_share("data", 0.6)
    few = tuple(worker(number, steps=records(load, num_steps=6)) for number in range(2))
    assert _findings(job(ranks=few)) == {}

    def validating(index: int) -> dict[str, float]:
        return load(index) | {"validation": 2.0}

    assert _findings(team(validating, validating)) == {}


@pytest.mark.parametrize(("factor", "is_found"), [(0.93, False), (1.07, True)])
@pytest.mark.parametrize(
    ("phase", "kind", "threshold"),
    [("data", "input", INPUT_SHARE), ("communication", "communication", COMMUNICATION_SHARE)],
)
def test_a_phase_binds_from_its_share_of_the_step_on(
    phase: str, kind: str, threshold: float, factor: float, *, is_found: bool
) -> None:
    # The transfer to the device counts as input too.
    share = factor * threshold - (HEALTHY["transfer"] / STEP_S if phase == "data" else 0)
    assert (kind in _findings(team(*[_with_share(phase, share)] * 4))) == is_found


def test_waiting_for_input_says_for_what_and_how_long() -> None:
    found = _findings(team(*[steady(data=0.1)] * 4))["input"]
    assert found.headline == "input-bound: 34% of a step goes into waiting for the batch"
    assert "data 100 ms of 298 ms" in found.evidence
    assert "workers" in found.advice
    copying = _findings(team(*[steady(transfer=0.1)] * 4))["input"]
    assert "pin" in copying.advice


@pytest.mark.parametrize("size", [2, 4])
def test_one_rank_that_waits_for_data_is_a_straggler_and_no_input_bound_job(size: int) -> None:
    found = _findings(team(*waiting_for(0.25, size=size, phase="data")))
    late = size - 1
    assert set(found) == {"straggler"}
    assert found["straggler"].ranks == (late,)
    assert found["straggler"].headline == f"straggler rank {late}: 250 ms a step late in data"
    assert "data 252 ms, its peers 2.00 ms" in found["straggler"].evidence
    assert "loader" in found["straggler"].advice
    assert found["straggler"].cost == pytest.approx(0.25 / (STEP_S + 0.25))


def test_a_rank_that_is_stopped_in_another_phase_each_time_is_late_in_none_of_them() -> None:
    phases = ("forward", "backward", "optimizer", "data")

    def stopped(index: int) -> dict[str, float]:
        phase = phases[index % len(phases)]
        return HEALTHY | {phase: HEALTHY[phase] + 0.25}

    waiting = steady(communication=HEALTHY["communication"] + 0.25)
    found = _findings(team(waiting, stopped))["straggler"]
    assert found.headline == "straggler rank 1: 250 ms a step late in several phases"
    assert "its peers" not in found.evidence[0]
    assert found.advice.startswith("look at its clocks, heat and other processes")


def test_waiting_for_a_late_rank_is_not_called_communication() -> None:
    assert set(_findings(team(*waiting_for(0.2, size=8)))) == {"straggler"}


def test_several_late_ranks_on_one_host_name_the_host() -> None:
    ranks = tuple(
        worker(
            number,
            steady(backward=HEALTHY["backward"] + (0.1 if number in {5, 6} else 0.0)),
            host="node-b" if number >= 4 else "node-a",
        )
        for number in range(7)
    )
    late = _findings(job(ranks=ranks))["straggler"]
    assert late.ranks == (5, 6)
    assert late.headline.startswith("stragglers 5, 6, the latest 5: 100 ms")
    assert "on host node-b" in late.evidence


def test_a_hot_gpu_with_low_clocks_is_evidence_against_its_rank() -> None:
    def gpu(number: int, celsius: float, *reasons: str) -> DeviceReading:
        return DeviceReading(
            kind="gpu", ranks=(number,), name="H100", temperature_celsius=celsius,
            throttle_reasons=reasons,
        )  # fmt: skip

    snapshot = team(*waiting_for(0.1, size=3))
    hot = _findings(snapshot, gpu(0, 60), gpu(1, 62), gpu(2, 89, "too hot"))["straggler"]
    assert "its GPU has 89 C, the others 61 C" in hot.evidence
    assert "its GPU is throttled, unlike most others: too hot" in hot.evidence
    assert "cool" in hot.advice
    cool = _findings(snapshot, gpu(0, 60), gpu(1, 62), gpu(2, 65))["straggler"].evidence
    assert not any("GPU" in fact or "clocks" in fact for fact in cool)


@pytest.mark.parametrize(("factor", "is_found"), [(0.9, False), (1.1, True)])
def test_ranks_that_are_late_in_turn_make_uneven_steps(factor: float, *, is_found: bool) -> None:
    # Of four ranks three wait for one of them, so the mean wait is 3/4 of what it is late.
    share = factor * UNEVEN_SHARE
    late = share * STEP_S / (0.75 - share)

    def load(number: int) -> Load:
        def phases(index: int) -> dict[str, float]:
            own = "forward" if index % 4 == number else "communication"
            return HEALTHY | {own: HEALTHY[own] + late}

        return phases

    found = _findings(team(*map(load, range(4))))
    assert set(found) == ({"uneven"} if is_found else set())


def test_communication_names_what_moves_most_and_how_fast() -> None:
    ranks = tuple(
        worker(
            number,
            steady(communication=0.2),
            collectives=(
                total(bytes_per_step=500e6, seconds_per_step=0.1),
                total("world", "broadcast", bytes_per_step=8.0),
            ),
        )
        for number in range(2)
    )
    found = _findings(job(ranks=ranks))["communication"]
    assert found.headline == "communication-bound: 52% of a step is exposed communication"
    assert "data all_reduce 500 MB at 5.00 GB/s" in found.evidence
    assert "compression" in found.advice
    uncounted = job(ranks=ranks, communication_note="no hook")
    assert _findings(uncounted) == {}


@pytest.mark.parametrize(
    ("share", "place", "device", "is_found"),
    [(1.1, "host", "cuda:0 (H100)", True), (0.9, "host", "cuda:0 (H100)", False),
     (1.1, "device", "cuda:0 (H100)", False), (1.1, "host", "cpu", False),
     (1.1, "disk", "cpu", True)],
)  # fmt: skip
def test_a_long_optimizer_binds_where_something_is_offloaded(
    share: float, place: Any, device: str, *, is_found: bool
) -> None:
    kinds = (MemoryKind("optimizer", place, 2**33, None),)
    load = _with_share("optimizer", share * OFFLOAD_SHARE - HEALTHY["transfer"] / STEP_S)
    ranks = tuple(worker(number, load, memory_kinds=kinds, device=device) for number in range(2))
    found = _findings(job(ranks=ranks))
    assert set(found) == ({"offload"} if is_found else set())
    if is_found:
        assert f"optimizer 8.00 GiB on {place}" in found["offload"].evidence


def test_copies_of_an_offloaded_job_are_not_its_input() -> None:
    kinds = (MemoryKind("parameters", "host", 2**33, None),)
    ranks = tuple(
        worker(number, steady(transfer=0.2), memory_kinds=kinds, device="cuda:0 (H100)")
        for number in range(2)
    )
    assert set(_findings(job(ranks=ranks))) == {"offload"}


def _gpu(used: float, number: int = 0) -> DeviceReading:
    return DeviceReading(
        kind="gpu",
        ranks=(number,),
        name="H100",
        memory_used_bytes=int(used * 2**36),
        memory_total_bytes=2**36,
    )


@pytest.mark.parametrize(("margin", "is_found"), [(-0.01, False), (0.01, True)])
def test_memory_is_near_its_limit_from_a_share_on(margin: float, *, is_found: bool) -> None:
    snapshot = team(steady(), steady())
    found = _findings(snapshot, _gpu(0.5), _gpu(DEVICE_NEARLY_FULL + margin, 1))
    assert set(found) == ({"memory"} if is_found else set())
    if is_found:
        assert found["memory"].ranks == (1,)
        assert found["memory"].headline == "memory near its limit: rank 1 at 96%"


def test_what_the_allocator_could_give_back_is_no_need() -> None:
    def with_peak(peak: float) -> JobSnapshot:
        memory = Memory(None, 2**30, int(0.9 * 2**36), int(peak * 2**36))
        return job(ranks=(worker(0, memory=memory),))

    assert _findings(with_peak(0.5), _gpu(0.98)) == {}
    assert set(_findings(with_peak(0.89), _gpu(0.98))) == {"memory"}


@pytest.mark.parametrize(("margin", "is_found"), [(-0.02, False), (0.02, True)])
def test_the_memory_of_a_host_is_shared_by_its_ranks(margin: float, *, is_found: bool) -> None:
    share = (HOST_NEARLY_FULL + margin) / 2
    devices = [
        DeviceReading(
            kind="process",
            ranks=(number,),
            name="node-a",
            memory_used_bytes=int(share * 2**38),
            memory_total_bytes=2**38,
        )
        for number in range(2)
    ]
    assert bool(_findings(team(steady(), steady()), *devices)) == is_found


def _expecting(measured: float, **changes: Any) -> JobSnapshot:
    ranks = tuple(
        worker(number, collectives=(total(bytes_per_step=measured),)) for number in range(2)
    )
    why = "gradients of all trainable parameters, once"
    expected = (ExpectedTraffic("data", "allreduce", 2000.0, None, why),)
    return job(**{"ranks": ranks, "global_step": 24, "expected": expected} | changes)


@pytest.mark.parametrize("measured", [1995.0, 2000.0, 2005.0])
def test_expected_bytes_are_no_finding(measured: float) -> None:
    assert _findings(_expecting(measured)) == {}


def test_twice_the_expected_bytes_are_a_finding() -> None:
    found = _findings(_expecting(4000.0))["traffic"]
    assert found.headline.startswith("data axis moves 2.0x the expected bytes: ")
    assert found.evidence == (
        "all_reduce 4.00 kB a step",
        "expected 2.00 kB: gradients of all trainable parameters, once",
    )
    assert _findings(_expecting(1000.0))["traffic"].headline.startswith("data axis moves 0.5x")
    assert _findings(_expecting(4000.0, global_step=2)) == {}


def test_bytes_for_each_accumulated_batch_name_no_sync() -> None:
    steps = tuple(step(index, global_step=index // 2) for index in range(24))
    ranks = tuple(
        worker(number, steps=steps, collectives=(total(bytes_per_step=4000.0),))
        for number in range(2)
    )
    found = _findings(_expecting(4000.0, ranks=ranks))["traffic"]
    assert "no_sync is missing" in found.headline


def test_an_operator_that_never_runs_is_a_finding() -> None:
    silent = tuple(worker(number) for number in range(2))
    found = _findings(_expecting(0.0, ranks=silent))["traffic"]
    assert found.headline.startswith("data axis: all_reduce does not run as the strategy expects")


def test_a_loss_that_is_no_number_says_since_when_and_what_it_was_before() -> None:
    history = losses(3.0, 2.5, math.nan, math.nan)
    found = _findings(team(steady(), steady(), history=history, checkpoint="a.ckpt"))["loss"]
    assert (found.severity, found.headline) == ("bad", "the loss is nan since step 3")
    assert found.evidence[0] == "2.5000 at step 2"
    assert "a.ckpt" in found.advice
    assert _findings(team(steady(), steady(), history=losses(math.nan, 2.0))) == {}


def test_a_loss_that_is_no_number_on_one_rank_names_the_rank() -> None:
    broken = tuple(step(index, loss=math.inf) for index in range(3, 12))
    ranks = (worker(0), worker(1, steps=broken))
    found = _findings(job(ranks=ranks, history=losses(2.0, 2.0)))["loss"]
    assert found.ranks == (1,)
    assert "on rank 1" in found.headline


def _silent(*phases: str, silent_s: float = 60.0, **changes: Any) -> JobSnapshot:
    ranks = tuple(
        rank(number, phase=phase, last_seen=NOW - silent_s, **changes)
        for number, phase in enumerate(phases)
    )
    return job(ranks=ranks)


@pytest.mark.parametrize(("silent_s", "is_found"), [(14.0, False), (16.0, True)])
def test_silence_is_a_stall_after_a_while(silent_s: float, *, is_found: bool) -> None:
    found = _findings(_silent("data", "communication", silent_s=silent_s))
    assert set(found) == ({"stalled"} if is_found else set())


def test_a_stall_says_who_is_where_and_how_to_look() -> None:
    found = _findings(_silent("communication", "data", "communication"))["stalled"]
    assert found.headline == (
        "stalled: no step for 1m 00s, rank 1 is in data, ranks 0, 2 are in communication"
    )
    assert found.ranks == (1,)
    assert "py-spy dump --pid 1001" in found.advice


def test_a_long_validation_or_checkpoint_is_no_stall() -> None:
    assert _findings(_silent("validation", "validation")) == {}
    assert _findings(_silent("checkpoint", "validation")) == {}
    assert set(_findings(_silent("checkpoint", "data"))) == {"stalled"}


def test_a_stall_names_who_never_entered_the_collective() -> None:
    def group(sequence: int, *, is_done: bool) -> tuple[GroupProgress, ...]:
        return (GroupProgress("data", "g", (0, 1, 2), sequence, "allreduce", is_done, NOW - 60.0),)

    ranks = tuple(
        rank(
            number,
            phase="backward" if number == 2 else "communication",
            last_seen=NOW - 60.0,
            groups=group(40 if number == 2 else 41, is_done=number == 2),
        )
        for number in range(3)
    )
    found = _findings(job(ranks=ranks))["stalled"]
    assert found.ranks == (2,)
    assert "rank 2 never entered all_reduce #41 of data" in found.evidence[0]


def test_a_stall_is_told_as_a_rank_of_the_job_has_explained_it() -> None:
    ranks = _silent("communication", "forward").ranks
    said = "hang: rank 1 never entered all_reduce #41 of data. Rank 1 is at train.py:31."
    old = Event(NOW - 90.0, 0, "warning", "hang: of an earlier standstill")
    found = _findings(job(ranks=ranks, events=(old, Event(NOW - 9.0, 0, "warning", said))))
    assert found["stalled"].evidence == (said.removeprefix("hang: "),)
    assert "standstill" not in str(_findings(job(ranks=ranks, events=(old,)))["stalled"].evidence)


def test_nothing_else_is_said_of_the_steps_of_a_job_that_stands_still() -> None:
    ranks = tuple(
        worker(number, steady(data=0.5), last_seen=NOW - 90.0, phase="data") for number in range(2)
    )
    assert set(_findings(job(ranks=ranks))) == {"stalled"}


def test_a_crash_tells_the_rank_its_last_words_and_where_to_go_on() -> None:
    gone = rank(
        1,
        state="dead",
        phase="backward",
        in_flight=CollectiveInFlight("data", "allreduce", 7, is_done=False),
    )
    snapshot = job(
        state="crashed",
        ranks=(rank(0, state="failed", error="Connection closed by peer"), gone),
        cause="rank 1 was killed by SIGKILL, in backward after step 10.",
        events=(Event(NOW, 1, "warning", "loss scale is 1"),),
        checkpoint="last.ckpt",
    )
    found = _findings(snapshot)["crashed"]
    assert found.ranks == (1,)
    assert found.headline == "crashed: rank 1 was killed by SIGKILL, in backward after step 10"
    assert "last loss 2.0000 at step 10" in found.evidence
    assert "last event: warning, loss scale is 1" in found.evidence
    assert "dmesg" in found.advice
    assert "last.ckpt" in found.advice


def test_a_crash_without_a_cause_names_the_rank_that_fell_silent_first() -> None:
    ranks = (
        rank(0, state="failed", last_seen=NOW - 1, error="Connection closed by peer"),
        rank(1, state="dead", last_seen=NOW - 5, phase="backward", global_step=41),
    )
    found = _findings(job(state="failed", ranks=ranks))["crashed"]
    assert found.headline == "failed: rank 1 went first"
    assert "in backward after step 41" in found.evidence
    assert "no checkpoint" in found.advice
    assert _findings(job(state="failed", ranks=()))["crashed"].headline.endswith("no rank says why")


def test_running_out_of_memory_is_met_with_other_advice() -> None:
    cause = "rank 0 failed in forward: OutOfMemoryError: CUDA out of memory."
    found = _findings(job(state="failed", cause=cause, ranks=(rank(0, state="failed"),)))
    assert "smaller batch" in found["crashed"].advice


def test_the_most_severe_comes_first_and_then_what_costs_most() -> None:
    snapshot = team(
        *[steady(data=0.06, communication=0.12)] * 2,
        history=losses(1.0, math.nan),
        expected=(ExpectedTraffic("data", "allreduce", 1.0, None, ""),),
    )
    shown = msgspec.structs.replace(state(snapshot), devices=(_gpu(0.99),))
    kinds = [finding.kind for finding in diagnose(shown)]
    assert kinds == ["loss", "memory", "traffic", "communication", "input"]


@pytest.mark.parametrize("look", [LOOK, Style(ASCII, has_signs=False)], ids=["signs", "words"])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (3, 2), (20, 1), (60, 9), (300, 20)])
def test_a_diagnosis_fits_its_place(width: int, height: int, look: Style) -> None:
    states = [
        state(team(*waiting_for(0.1, size=4), history=losses(1.0, math.nan))),
        state(crashed_demo().job),
        state(job(ranks=())),
        state(demo().job),
        fold_loss_of_source(state(_silent("data", "data")), "it is gone \x1b[2J"),
    ]
    for shown in states:
        lines = draw_diagnosis(shown, width, height, look)
        assert len(lines) <= height
        assert all(cell_len(line.plain) == line.width <= width for line in lines)
        assert "\x1b" not in "".join(line.plain for line in lines)


def _text(shown: State, width: int = 100, height: int = 9) -> str:
    return "\n".join(line.plain for line in draw_diagnosis(shown, width, height, LOOK))


def test_the_drawing_has_the_headline_the_evidence_and_what_to_try() -> None:
    text = _text(state(team(*waiting_for(0.1, size=4))))
    assert text.startswith("! straggler rank 3: 100 ms a step late in forward [forward 160 ms")
    assert "\n  try: look at its clocks" in text


def test_nothing_is_drawn_where_nothing_is_wrong() -> None:
    well = state(team(steady(), steady()))
    assert draw_diagnosis(well, 80, 5, LOOK) == []
    assert diagnosis_lines(well, 80, LOOK) == 0


def test_findings_that_have_no_place_are_counted() -> None:
    shown = state(team(*waiting_for(0.2, size=4, phase="data"), history=losses(1.0, math.nan)))
    assert len(diagnose(shown)) == 2
    assert "(+1 more finding)" in _text(shown, height=1)
    for height in range(2, 12):
        text = _text(shown, height=height)
        assert ("(+1 more finding)" in text) is ("straggler" not in text and "input" not in text)


def test_the_state_of_a_job_is_told_once() -> None:
    assert "waiting for the first step" in _text(state(job(ranks=(rank(steps=()),))))
    crash = state(job(state="crashed", cause="rank 1 was killed by SIGKILL."))
    assert _text(crash).count("was killed") == 1
    lost = fold_loss_of_source(state(_silent("data", "data")), "its folder is gone")
    assert "its folder is gone" in _text(lost)
    assert "stalled" in _text(lost)


def test_the_diagnosis_asks_for_the_lines_that_it_fills() -> None:
    for width in (20, 40, 80, 200):
        shown = state(team(*waiting_for(0.1, size=4)))
        lines = diagnosis_lines(shown, width, LOOK)
        assert len(draw_diagnosis(shown, width, lines, LOOK)) == lines > 0
