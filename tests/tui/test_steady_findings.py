"""Findings do not flap, and full CPUs are named instead of the ranks that vary with them."""

import random
from itertools import pairwise

import msgspec
import pytest

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.findings.finding import KEPT
from boltmesh.tui.metrics.findings.waits import COMMUNICATION_SHARE
from boltmesh.tui.metrics.step_time import judged_times, recent_times
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import State, fold
from tests.tui.loads import HEALTHY, Load, records, steady, team, waiting_for, worker
from tests.tui.samples import NOW, job, state

LOOKS = 100


def _noisy(seed: int, spread: float) -> list[Load]:
    """Two synchronous ranks that the host holds up at random; who is first waits for the other."""
    draw = random.Random(seed)
    delays = [[draw.expovariate(1 / spread) for _ in range(2)] for _ in range(600)]

    def load(rank: int) -> Load:
        def phases(index: int) -> dict[str, float]:
            own, other = delays[index][rank], delays[index][1 - rank]
            wait = HEALTHY["communication"] + max(0.0, other - own)
            return HEALTHY | {"forward": HEALTHY["forward"] + own, "communication": wait}

        return phases

    return [load(0), load(1)]


def _looks(loads: list[Load], devices: tuple[DeviceReading, ...] = ()) -> list[frozenset[str]]:
    """The kinds of findings at each look, three steps after the one before."""
    made = [records(load, num_steps=240 + 3 * LOOKS) for load in loads]
    found: list[frozenset[str]] = []
    shown: State | None = None
    for look in range(LOOKS):
        ranks = tuple(
            worker(number, steps=steps[: 240 + 3 * look], global_step=240 + 3 * look)
            for number, steps in enumerate(made)
        )
        shown = fold(shown, Observation(NOW, job(ranks=ranks), devices))
        found.append(frozenset(finding.kind for finding in diagnose(shown)))
    return found


def _changes(found: list[frozenset[str]]) -> int:
    return sum(before != after for before, after in pairwise(found))


def _devices(host: float, *ranks: float) -> tuple[DeviceReading, ...]:
    readings = [
        DeviceReading("process", (at,), "here", utilization_percent=percent)
        for at, percent in enumerate(ranks)
    ]
    all_ranks = tuple(range(len(ranks)))
    whole = DeviceReading("host", all_ranks, "here", utilization_percent=host, num_cores=2)
    return (whole, *readings)


@pytest.mark.each_choice
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.01, 0.05, 0.1])
def test_a_healthy_job_on_a_noisy_host_changes_at_most_once_in_100_looks(
    seed: int, spread: float
) -> None:
    found = _looks(_noisy(seed, spread))
    assert _changes(found) <= 1
    assert not any("straggler" in kinds for kinds in found)


def test_full_cpus_are_what_is_named() -> None:
    found = _looks(_noisy(0, 0.1), _devices(100.0, 50.0, 50.0))
    assert set(found) == {frozenset({"host"})}
    (told,) = diagnose(_state(team(*waiting_for(0.2, size=2)), _devices(100.0, 40.0, 60.0)))
    assert told.headline == "the CPUs of here are full: 100% of 2 cores"
    assert "other processes 50%" in told.evidence
    assert told.ranks == (0, 1)


def test_cpus_that_the_ranks_fill_themselves_are_no_finding() -> None:
    shown = _state(team(*waiting_for(0.2, size=2)), _devices(100.0, 98.0, 98.0))
    assert [finding.kind for finding in diagnose(shown)] == ["straggler"]


def test_ranks_on_gpus_do_not_compute_there() -> None:
    snapshot = team(*waiting_for(0.2, size=2))
    ranks = tuple(msgspec.structs.replace(each, device="cuda:0 (H100)") for each in snapshot.ranks)
    shown = _state(msgspec.structs.replace(snapshot, ranks=ranks), _devices(100.0, 40.0, 60.0))
    assert {finding.kind for finding in diagnose(shown)} == {"straggler"}


def _state(snapshot: JobSnapshot, devices: tuple[DeviceReading, ...]) -> State:
    return msgspec.structs.replace(state(snapshot), devices=devices)


@pytest.mark.parametrize(("share", "is_kept"), [(0.95, True), (0.85 * KEPT, False)])
def test_a_finding_stays_until_its_figure_is_clear_of_the_limit(
    share: float, *, is_kept: bool
) -> None:
    def with_share(share: float) -> JobSnapshot:
        rest = sum(HEALTHY.values()) - HEALTHY["communication"]
        return team(*[steady(communication=rest * share / (1 - share))] * 2)

    below = with_share(share * COMMUNICATION_SHARE)
    assert diagnose(state(below)) == ()
    before = fold(None, Observation(NOW, with_share(1.2 * COMMUNICATION_SHARE)))
    after = fold(before, Observation(NOW + 1, below))
    assert bool(diagnose(after)) == is_kept


def test_short_steps_are_judged_by_many_and_long_ones_by_few() -> None:
    def of(load: Load, num_steps: int) -> JobSnapshot:
        steps = records(load, num_steps=num_steps)
        return job(ranks=tuple(worker(at, steps=steps) for at in range(2)))

    many, slow = of(steady(), 400), of(steady(forward=9.0), 400)
    assert len(recent_times(many)[0].seconds) == 20
    assert len(judged_times(many)[0].seconds) in {149, 150}  # 30 s of 200 ms each
    assert len(judged_times(slow)[0].seconds) == 20
    assert len(judged_times(of(steady(), 24))[0].seconds) == 24
