"""CSV tables, and the files that ``boltmesh export-metrics`` writes."""

import csv
import io
import math
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from boltmesh.errors import ConfigError, TelemetryError
from boltmesh.telemetry.snapshot import PHASES, MetricPoint, PhaseTime
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.commands.export import check_export, export
from boltmesh.tui.export.tables import TABLES, csv_text
from boltmesh.tui.metrics.figures import Figures
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.sources.replay import ReplaySource
from tests.tui.exposition import parse
from tests.tui.loads import HEALTHY, worker
from tests.tui.played import RING, look, write
from tests.tui.samples import NOW, FakeSource, job, rank, step, total


def rows_of(name: str, *looks: Observation) -> list[dict[str, str]]:
    return rows("".join(csv_text(name, looks)))


def rows(text: str) -> list[dict[str, str]]:
    assert text.endswith("\n")
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def seen(**changes: Any) -> Observation:
    return Observation(time=NOW, job=job(**changes))


# --- tables


def test_a_step_is_a_row_with_its_phases() -> None:
    phases = (PhaseTime("data", 0.125), PhaseTime("forward", 0.25))
    steps = (step(3, phases=phases, tokens=None),)
    (row,) = rows_of("steps", seen(ranks=(rank(5, steps=steps),)))
    assert tuple(row) == TABLES["steps"].columns
    assert (row["job"], row["rank"], row["index"], row["global_step"]) == ("abc123", "5", "3", "4")
    assert (row["seconds"], row["loss"], row["tokens"]) == ("0.5", "2.0", "")
    assert (row["data_s"], row["forward_s"], row["backward_s"]) == ("0.125", "0.25", "")
    assert {f"{name}_s" for name in PHASES} <= set(row)


def test_a_metric_is_a_row_for_each_point() -> None:
    history = (MetricPoint("loss", 1, 2.5), MetricPoint("val_loss", 1, math.nan))
    assert rows_of("metrics", seen(history=history)) == [
        {"job": "abc123", "metric": "loss", "global_step": "1", "value": "2.5"},
        {"job": "abc123", "metric": "val_loss", "global_step": "1", "value": "nan"},
    ]


def test_a_collective_stands_beside_what_the_strategy_expects() -> None:
    expected = tuple(
        ExpectedTraffic("data", "allreduce", size, 1.0, "x") for size in (1500.0, 500.0)
    )
    ranks = (rank(0, collectives=(total(), total(axis="world", operator="broadcast"))),)
    first, second = rows_of("collectives", seen(ranks=ranks, expected=expected))
    assert (first["axis"], first["operator"], first["payload_bytes"]) == (
        "data", "allreduce", "20000",
    )  # fmt: skip
    assert (first["bytes_per_step"], first["expected_bytes_per_step"]) == ("2000.0", "2000.0")
    assert (second["axis"], second["expected_bytes_per_step"]) == ("world", "")


def test_a_rank_is_a_row_with_its_place_and_its_memory() -> None:
    first, second = rows_of("ranks", seen())
    assert (first["rank"], second["rank"], second["data"]) == ("0", "1", "1")
    assert first["host_rss_bytes"] == str(2**30)
    assert first["device_peak_bytes"] == ""
    assert first["state"] == "running"


@pytest.mark.parametrize("is_over", [False, True])
def test_headline_figures_are_rows(*, is_over: bool) -> None:
    ranks = tuple(worker(at, flops_per_batch=4e12, peak_flops_per_second=40e12) for at in range(2))
    past = {"state": "finished", "updated": NOW - 90} if is_over else {}
    found = {row["figure"]: row for row in rows_of("figures", seen(ranks=ranks, **past))}
    assert set(found) == set(Figures.__struct_fields__)
    step_s = sum(HEALTHY.values())
    assert float(found["step_s"]["value"]) == pytest.approx(step_s)
    assert found["bubble_ratio"]["value"] == ""
    share = HEALTHY["communication"] / step_s
    assert float(found["exposed_communication"]["value"]) == pytest.approx(share)
    now, before = ("", "90.0") if is_over else ("2048.0", "")
    assert (found["tokens_per_s"]["value"], found["tokens_per_s"]["age_s"]) == (now, before)
    mfu = found["mfu"]["last" if is_over else "value"]
    assert float(mfu) == pytest.approx(4 / step_s / 40)
    assert all(row["definition"] for row in found.values())


def test_of_many_looks_each_record_is_written_once() -> None:
    looks = [look(second) for second in (RING, RING + 3, RING + 3, RING + 7)]
    found = rows_of("steps", *looks)
    for number in ("0", "1"):
        indices = [int(row["index"]) for row in found if row["rank"] == number]
        assert indices == list(range(RING + 7))
    points = [int(row["global_step"]) for row in rows_of("metrics", *looks)]
    assert points == list(range(1, RING + 8))
    totals = rows_of("collectives", *looks)
    assert [row["calls"] for row in totals] == [str(RING + 7)] * 2


def test_no_look_is_a_table_without_rows() -> None:
    for name, table in TABLES.items():
        assert "".join(csv_text(name, ())) == ",".join(table.columns) + "\n"


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "=cmd|'/c calc'!A0", '="a,b"\n"c"']
)
def test_no_cell_of_text_starts_a_formula(text: str) -> None:
    point = MetricPoint(text, 1, -1.5)
    broken = rank(0, host=text, error=text, collectives=(total(axis=text),))
    for name in TABLES:
        for row in rows_of(name, seen(id=text, ranks=(broken,), history=(point,))):
            assert all(cell[:1] not in "=+@\t\r" for cell in row.values() if cell)
            assert row["job"].startswith(("'", " "))


def test_numbers_stay_numbers() -> None:
    steps = (step(0, loss=-1.5), step(1, loss=-math.inf), step(2, loss=math.nan))
    found = [row["loss"] for row in rows_of("steps", seen(ranks=(rank(0, steps=steps),)))]
    assert [float(value) for value in found[:2]] == [-1.5, -math.inf]
    assert math.isnan(float(found[2]))


def test_text_with_separators_comes_back_whole() -> None:
    name = 'a,b "c"; d'
    (row,) = rows_of("metrics", seen(history=(MetricPoint(name, 1, 1.0),)))
    assert row["metric"] == name


# --- files


def run(source: Any, **changes: Any) -> str:
    written: list[str] = []
    options: dict[str, Any] = {
        "form": "prometheus",
        "table": None,
        "output": None,
        "every_s": None,
        "out": written.append,
    }
    export(source, **options | changes)
    return "".join(written)


def test_one_look_goes_to_stdout() -> None:
    text = run(FakeSource(look(5)))
    assert parse(text)["boltmesh_job_steps_total"].value() == 5


def test_a_file_is_replaced_whole_and_can_be_read_by_a_collector(tmp_path: Path) -> None:
    path = tmp_path / "boltmesh.prom"
    path.write_text("old")
    old = path.open()
    before = os.umask(0o022)
    try:
        assert run(FakeSource(look(5)), output=path) == ""
    finally:
        os.umask(before)
    assert old.read() == "old", "whoever reads goes on reading what was there"
    old.close()
    assert parse(path.read_text())["boltmesh_job_steps_total"].value() == 5
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["boltmesh.prom"]


def test_every_interval_it_is_written_again_until_the_job_ends(tmp_path: Path) -> None:
    path = tmp_path / "boltmesh.prom"
    steps: list[float] = []

    def sleep(seconds: float) -> None:
        assert seconds == 15.0
        steps.append(parse(path.read_text())["boltmesh_job_steps_total"].value())

    source = FakeSource(*(look(second, last=4) for second in range(1, 6)))
    run(source, output=path, every_s=15.0, sleep=sleep)
    assert steps == [1, 2, 3]
    last = parse(path.read_text())
    assert last["boltmesh_job_steps_total"].value() == 4
    assert last["boltmesh_job_state"].value(state="finished") == 1


@pytest.mark.parametrize("form", ["prometheus", "csv"])
def test_a_write_that_fails_leaves_what_was_there(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figures"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ConfigError, match="figures cannot be written: No space left on device"):
        run(FakeSource(look(5)), form=form, output=path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["figures"]


def test_a_disk_that_fills_up_later_is_a_failure_and_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_: float) -> None:
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))

    with pytest.raises(TelemetryError, match="cannot be written: full"):
        run(FakeSource(look(1), look(2)), output=tmp_path / "a.prom", every_s=1.0, sleep=fill)


def test_a_place_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "a.prom"):
        with pytest.raises(ConfigError, match=str(path)):
            run(FakeSource(look(5)), output=path)
    assert os.listdir(tmp_path) == []


def test_a_recording_gives_its_records_up_to_the_moment(
    tmp_path: Path, replay: Callable[..., ReplaySource]
) -> None:
    path = write(tmp_path / "a.rec", *(look(second) for second in range(0, 60, 5)))

    def indices(source: ReplaySource) -> Iterable[int]:
        return [int(row["index"]) for row in rows(run(source, form="csv")) if row["rank"] == "0"]

    source = replay(path)
    source.seek(NOW + 55)
    assert indices(source) == list(range(55))
    source.seek(NOW + 20)
    assert indices(source) == list(range(20))
    source.seek(NOW + 20)
    assert parse(run(source))["boltmesh_job_steps_total"].value() == 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"form": "xml"}, "--format xml: there is no such format. Use prometheus"),
        ({"table": "steps"}, "--table chooses what a CSV file has. Add --format csv."),
        (
            {"form": "csv", "table": "rows"},
            "metrics, collectives, ranks, offload, figures.",
        ),
        ({"every_s": 1.0}, "--every renews a file. Add --output FILE."),
        ({"every_s": 1.0, "form": "csv"}, "--every renews a file of metrics."),
        ({"every_s": 1.0, "replay": Path("a")}, "Leave out --replay."),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {
        "form": "prometheus",
        "table": None,
        "output": None,
        "every_s": None,
        "replay": None,
    }
    with pytest.raises(ConfigError) as caught:
        check_export(**given | options)
    assert says in str(caught.value)
