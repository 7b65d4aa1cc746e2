"""Two runs beside each other: charts of both, and a table of what differs."""

import json
from pathlib import Path

import msgspec
import pytest

from boltmesh.telemetry.snapshot import JobSnapshot, MetricPoint
from boltmesh.tui.commands import targets
from boltmesh.tui.commands.top import top
from boltmesh.tui.panels.differences import Difference, differences
from boltmesh.tui.panels.history import charts
from boltmesh.tui.session import Session
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import State, fold
from tests.tui.played import write
from tests.tui.samples import NOW, FakeSource, demo, job, losses
from tests.tui.screens import job_screen, open_source, screen_text


def _slower() -> Observation:
    seen = demo(scenario="straggler", later_s=60)
    changed = msgspec.structs.replace(
        seen.job,
        id="second",
        name="second",
        hyperparameters={**seen.job.hyperparameters, "learning_rate": "3e-4", "dropout": "0.1"},
    )
    return msgspec.structs.replace(seen, job=changed)


def _state(this: JobSnapshot, other: JobSnapshot) -> State:
    states = [fold(None, Observation(NOW, each)) for each in (this, other)]
    return msgspec.structs.replace(states[0], other=states[1])


async def test_the_screen_begins_with_both_runs() -> None:
    source, other = FakeSource(demo()), FakeSource(_slower())
    async with open_source(source, size=(120, 35), other=other, first_page="compare") as pilot:
        assert job_screen(pilot).page.tab.name == "compare"
        text = screen_text(pilot.app)
        assert "gpt-3b on demo text (gpt-demo) beside second (second)" in text
        await pilot.press("end")
        text = screen_text(pilot.app)
        assert "learning_rate" in text
        assert "6e-4" in text
        assert "3e-4" in text
        await pilot.press("left")
        assert "at step" in screen_text(pilot.app)


async def test_ended_runs_are_compared_at_once_too() -> None:
    ended = Observation(NOW, job(state="finished", history=losses(2.0, 1.0)))
    source, other = FakeSource(ended), FakeSource(ended)
    async with open_source(source, size=(80, 24), other=other, first_page="compare") as pilot:
        assert job_screen(pilot).page.tab.name == "compare"


async def test_a_run_alone_says_how_to_compare() -> None:
    async with open_source(FakeSource(demo()), size=(80, 24)) as pilot:
        await pilot.press("v")
        assert "boltmesh top RUN OTHER" in screen_text(pilot.app)


def test_rows_have_both_numbers_and_only_settings_that_differ() -> None:
    this = job(tokens_per_second=2000.0, history=losses(4.0, 3.0, 2.0), max_steps=100)
    other = job(tokens_per_second=1000.0, history=losses(5.0, 4.0), id="b", max_steps=200)
    rows = {row.what: row for row in differences(_state(this, other))}
    assert rows["tokens/s"].ratio == pytest.approx(1.0)
    assert rows["loss at step 2"] == Difference("loss at step 2", "3.0000", "4.0000", -0.25)
    assert (rows["max_steps"].this, rows["max_steps"].other) == ("100", "200")
    assert not {"id", "name", "strategy"} & set(rows)


def test_charts_have_the_other_run_over_steps_and_over_time() -> None:
    clock = (MetricPoint("wall_s", 1, NOW - 90), MetricPoint("wall_s", 2, NOW - 80))
    this = job(history=losses(4.0, 3.0), trends=clock)
    slower = tuple(MetricPoint("wall_s", p.global_step, NOW + 20 * p.global_step) for p in clock)
    other = job(history=losses(5.0, 4.0), trends=slower, started=NOW)
    state = _state(this, other)
    chart = charts(state)[0]
    assert chart.other is not None
    assert chart.other.values == (5.0, 4.0)
    timed = charts(state, is_time=True)[0]
    assert timed.series.steps == pytest.approx((10, 20))
    assert timed.other is not None
    assert timed.other.steps == pytest.approx((20, 40))


def test_the_other_run_is_closed_and_one_that_has_ended_read_once() -> None:
    ended = msgspec.structs.replace(demo(), job=job(state="finished"))
    other = FakeSource(ended)
    session = Session(FakeSource(demo(), demo()), other=other)
    for _ in range(2):
        session.take(session.look())
    assert session.state is not None
    assert session.state.other is not None
    session.close()
    assert other.is_closed


def test_recordings_are_compared_as_text_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "CPU_SAMPLE_S", 0.0)
    files = [tmp_path / "a.bolt", tmp_path / "b.bolt"]
    for path, seen in zip(files, (demo(), _slower()), strict=True):
        write(path, seen)
    assert top(str(files[0]), str(files[1]), once=True) == 0
    text = capsys.readouterr().out
    assert "learning_rate" in text
    assert "3e-4" in text
    assert top(str(files[0]), str(files[1]), once=True, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["other"] == "second"
    assert any(row["what"] == "learning_rate" for row in document["differences"])
    assert top(str(files[0]), str(files[1]), as_json=True) == 2
    assert "Add --once" in capsys.readouterr().err
