"""The headline figures of the JSON document, and that the screens show the same."""

import json
from typing import Any

import msgspec
import pytest

from boltmesh.telemetry.snapshot import JobSnapshot, PhaseTime
from boltmesh.tui import units
from boltmesh.tui.commands.top import job_json, job_text
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.export.html import html_page
from boltmesh.tui.metrics.figures import Figures, figures
from boltmesh.tui.metrics.heat import heat
from boltmesh.tui.metrics.pipelines import bubble_ratio
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.metrics.step_time import phase_split
from boltmesh.tui.panels.header import draw_headline
from boltmesh.tui.panels.rank_detail import draw_rank_detail
from boltmesh.tui.panels.rank_table import draw_rank_table
from boltmesh.tui.panels.throughput import draw_phases, draw_throughput
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from tests.tui.loads import HEALTHY, records, steady, team, worker
from tests.tui.samples import NOW, demo, job, rank, state, step

LOOK = Style(UNICODE)
STEP_S = sum(HEALTHY.values())


def _document(snapshot: JobSnapshot, *devices: DeviceReading) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(job_json(Observation(NOW, snapshot, devices)))["figures"]
    return found


def _known(**changes: Any) -> JobSnapshot:
    ranks = tuple(
        worker(number, flops_per_batch=40e12, peak_flops_per_second=400e12) for number in range(2)
    )
    return job(**{"ranks": ranks, "global_step": 24} | changes)


def test_each_has_a_value_and_its_definition() -> None:
    found = _document(_known())
    assert set(found) == set(Figures.__struct_fields__)
    assert all(set(each) == {"value", "definition", "last", "age_s"} for each in found.values())
    assert all(each["definition"] for each in found.values())
    assert found["step_s"]["value"] == pytest.approx(STEP_S)
    assert found["model_tflops"]["value"] == pytest.approx(2 * 40 / STEP_S)
    assert found["mfu"]["value"] == pytest.approx(40 / STEP_S / 400)
    assert found["tokens_per_s"]["value"] == 2048
    share = HEALTHY["communication"] / STEP_S
    assert found["exposed_communication"]["value"] == pytest.approx(share)
    assert found["bubble_ratio"]["value"] is None
    assert found["memory_bytes"]["value"] == 2**30
    assert found["utilisation"]["value"] is None


def test_hardware_flops_have_what_is_computed_again() -> None:
    known = _known().ranks
    ranks = tuple(msgspec.structs.replace(each, recomputed_flops_per_batch=10e12) for each in known)
    found = _document(_known(ranks=ranks))
    assert found["model_tflops"]["value"] == pytest.approx(2 * 40 / STEP_S)
    assert found["hardware_tflops"]["value"] == pytest.approx(2 * 50 / STEP_S)
    assert found["hfu"]["value"] == pytest.approx(50 / STEP_S / 400)
    shown = f"HFU {50 / STEP_S / 400:.1%}"
    seen = state(_known(ranks=ranks))
    assert shown in "\n".join(line.plain for line in draw_throughput(seen, 120, 4, LOOK))
    assert shown in job_text(seen, 120, LOOK)
    # Not known where one rank has not counted; not shown where nothing is computed again.
    partly = _document(_known(ranks=(ranks[0], known[1])))
    assert partly["hfu"]["value"] is partly["hardware_tflops"]["value"] is None
    none = tuple(msgspec.structs.replace(each, recomputed_flops_per_batch=0.0) for each in ranks)
    assert _document(_known(ranks=none))["hfu"]["value"] == pytest.approx(40 / STEP_S / 400)
    assert "HFU" not in job_text(state(_known(ranks=none)), 120, LOOK)


def test_use_and_memory_are_those_of_the_devices() -> None:
    readings = [
        DeviceReading(
            kind="process",
            ranks=(number,),
            name="here",
            utilization_percent=100.0 * (number + 1),
            memory_used_bytes=(number + 1) * 2**20,
        )
        for number in range(2)
    ]
    found = _document(_known(), *readings)
    assert found["utilisation"]["value"] == pytest.approx(1.5)
    assert found["memory_bytes"]["value"] == 2 * 2**20


def test_accumulated_batches_are_one_step() -> None:
    made = worker(0)
    steps = tuple(
        msgspec.structs.replace(each, global_step=(each.index + 1) // 4) for each in made.steps
    )
    snapshot = job(ranks=(msgspec.structs.replace(made, steps=steps),))
    assert _document(snapshot)["step_s"]["value"] == pytest.approx(4 * STEP_S)
    shown = fold(None, Observation(NOW, snapshot))
    (row,) = rank_rows(shown)
    assert row.step_s == pytest.approx(4 * STEP_S)
    assert row.profile is not None
    assert row.compute_s == pytest.approx(4 * (STEP_S - HEALTHY["communication"]))
    assert heat(shown, "step time").values[0].value == row.step_s
    page = html_page(shown)
    assert f"<td>{units.seconds(4 * STEP_S)}</td>" in page
    assert "<h2>Batch time, 4 a step</h2>" in page
    detail = "\n".join(line.plain for line in draw_rank_detail(shown, 80, 40, LOOK))
    assert "batch time, 4 a step" in detail
    assert f"mean {units.seconds(STEP_S)}" in detail
    assert f"forward {units.seconds(4 * HEALTHY['forward'])}" in " ".join(detail.split())


@pytest.mark.parametrize("batches", [3, 8, 64])
def test_the_figures_of_accumulated_steps_are_the_same_at_each_of_their_batches(
    batches: int,
) -> None:
    work_s, wait_s = 0.01 * (batches - 1) + 0.35, 0.15
    for first in range(256, 256 + batches):
        steps = []
        for index in range(first, first + 256):
            is_last = (index + 1) % batches == 0
            phases = [PhaseTime("forward", 0.01)]
            if is_last:
                phases = [PhaseTime("optimizer", 0.35), PhaseTime("communication", wait_s)]
            steps.append(
                step(
                    index,
                    global_step=(index + 1) // batches,
                    seconds=0.5 if is_last else 0.01,
                    phases=tuple(phases),
                )
            )
        busy = rank(0, steps=tuple(steps), flops_per_batch=1e9, peak_flops_per_second=1e12)
        found = figures(state(job(ranks=(busy,))))
        assert found.step_s.value == pytest.approx(work_s + wait_s)
        assert found.exposed_communication.value == pytest.approx(wait_s / (work_s + wait_s))
        assert found.mfu.value == pytest.approx(batches * 1e-3 / (work_s + wait_s))


RATES = ("mfu", "model_tflops", "samples_per_s", "tokens_per_s")


@pytest.mark.parametrize("end", ["stalled", "finished", "crashed"])
def test_rates_of_a_job_that_is_stalled_or_has_ended_are_past(end: str) -> None:
    ranks = tuple(msgspec.structs.replace(each, last_seen=NOW - 90) for each in _known().ranks)
    past = {} if end == "stalled" else {"state": end, "updated": NOW - 90}
    now, later = _known(), _known(ranks=ranks, **past)
    before, found = _document(now), _document(later)
    assert [found[name]["value"] for name in RATES] == [None] * 4
    assert [found[name]["last"] for name in RATES] == [before[name]["value"] for name in RATES]
    assert all(before[name]["last"] is before[name]["age_s"] is None for name in RATES)
    assert {found[name]["age_s"] for name in RATES} == {90}
    assert found["step_s"]["value"] == pytest.approx(STEP_S)
    document = json.loads(job_json(Observation(NOW, later)))
    assert document["samples_per_second"] is document["tokens_per_second"] is None
    seen = state(later)
    for drawn in (
        [draw_headline(seen, 120, LOOK)],
        draw_throughput(seen, 60, 5, LOOK),
        draw_throughput(seen, 120, 1, LOOK),
        [Line(job_text(seen, 120, LOOK))],
    ):
        assert "- last 2,048 1m 30s ago" in " ".join(" ".join(x.plain for x in drawn).split())
    assert "2,048" in draw_headline(state(now), 120, LOOK).plain


def test_the_screens_show_these_values() -> None:
    seen = demo()
    shown = fold(None, seen)
    found = figures(shown)
    assert found.bubble_ratio.value == bubble_ratio(seen.job)
    text = "\n".join(line.plain for line in draw_throughput(shown, 100, 9, LOOK))
    once = job_text(shown, 120, LOOK)
    for value in (
        units.share(found.bubble_ratio.value),
        units.share(found.mfu.value),
        units.rate(found.tokens_per_s.value),
    ):
        assert value in text
        assert value in once
    assert units.seconds(found.step_s.value) in once
    phases = "\n".join(line.plain for line in draw_phases(shown, 60, 12, LOOK))
    assert units.seconds(found.step_s.value) in phases


@pytest.mark.parametrize("phase", ["validation", "checkpoint"])
def test_validation_and_checkpoints_are_not_in_the_step_time(phase: str) -> None:
    def load(index: int) -> dict[str, float]:
        return HEALTHY | ({phase: 4.0} if index == 20 else {})

    snapshot = team(load, load)
    split = phase_split(snapshot)
    assert split is not None
    assert split.seconds == pytest.approx(STEP_S)
    assert phase not in {each.name for each in split.phases}
    rows = draw_rank_table(state(snapshot), 160, 6, LOOK)
    assert all(units.seconds(STEP_S) in line.plain for line in rows[2:4])


def test_steps_that_warm_up_count_while_there_are_no_others() -> None:
    slow = worker(0, steps=records(steady(forward=3.0), num_steps=2))
    split = phase_split(job(ranks=(slow,)))
    assert split is not None
    assert split.seconds == pytest.approx(STEP_S - HEALTHY["forward"] + 3.0)
