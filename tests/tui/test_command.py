"""``boltmesh top`` and ``boltmesh jobs``: what goes where, and with which exit code."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.job import run_dir
from boltmesh.telemetry.reader.reader import JobSummary
from boltmesh.tui.commands import targets
from boltmesh.tui.commands.top import THEMES, jobs, top
from boltmesh.tui.sources.live import InterruptionError, Observation, Source
from boltmesh.tui.sources.ssh.hosts import Hosts
from tests.tui.samples import NOW, FakeSource, crashed_demo, demo, summary


class Host:
    """Jobs that the commands find instead of this host's."""

    def __init__(self) -> None:
        self.jobs: list[JobSummary] = []
        self.source: Source = FakeSource(demo())
        self.asked: list[str | None] = []

    def list_jobs(self, run_dir: Path | None) -> Sequence[JobSummary]:
        return self.jobs

    def attach(self, job: str | None, run_dir: Path | None) -> Source:
        self.asked.append(job)
        return self.source


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(targets, "list_jobs", host.list_jobs)
    monkeypatch.setattr(targets, "attach", host.attach)
    monkeypatch.setattr(targets, "CPU_SAMPLE_S", 0.0)
    return host


Capture = pytest.CaptureFixture[str]


def test_without_a_job_one_line_says_how_to_get_one(capsys: Capture) -> None:
    assert top(once=True) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"boltmesh: No job of yours is in {run_dir()}. ")
    assert "boltmesh fit" in err
    assert "boltmesh top --demo" in err
    assert err.count("\n") == 1


def test_an_unknown_job_is_answered_with_the_nearest(tmp_path: Path, capsys: Capture) -> None:
    assert top("nothing-like-it", once=True, run_dir=tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_screen_needs_a_terminal(capsys: Capture) -> None:
    assert top(demo=True) == 2
    err = capsys.readouterr().err
    assert "needs a terminal" in err
    assert "--once" in err


def test_a_theme_that_does_not_exist_is_answered_with_those_that_do(capsys: Capture) -> None:
    assert top(demo=True, theme="neon") == 2
    assert "night, day, terminal, mono" in capsys.readouterr().err


def test_the_names_of_themes_are_those_of_the_palettes() -> None:
    from boltmesh.tui.theme import PALETTES

    assert tuple(PALETTES) == THEMES


def test_the_demo_is_no_job_that_could_be_named(capsys: Capture) -> None:
    assert top("abc", demo=True, once=True) == 2
    assert "has no 'abc'. Use healthy, straggler" in capsys.readouterr().err
    assert top("gpu", demo=True, once=True) == 0
    assert "gpt-3b" in capsys.readouterr().out


def test_a_summary_is_plain_text_of_the_width_that_is_asked_for(
    host: Host, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.jobs = [summary(1)]
    for columns in (40, 72, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        host.source = FakeSource(demo())
        assert top(once=True) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert "\x1b" not in out
        assert max(map(len, out.splitlines())) <= columns
        assert "step 4,200 / 20,000" in out


def test_ascii_is_ascii(host: Host, capsys: Capture) -> None:
    host.jobs = [summary(1)]
    assert top(once=True, ascii_only=True) == 0
    assert capsys.readouterr().out.isascii()


def test_the_newest_of_several_running_jobs_is_summarised_and_the_others_are_named(
    host: Host, capsys: Capture
) -> None:
    host.jobs = [summary(1), summary(2, state="finished"), summary(3)]
    assert top(once=True) == 0
    assert host.asked == [None]
    assert capsys.readouterr().err == (
        "boltmesh: 2 jobs are running; this is the newest. Name another: job3.\n"
    )
    assert top("job3", once=True) == 0
    assert host.asked == [None, "job3"]
    assert capsys.readouterr().err == ""


def test_one_json_object_on_one_line(host: Host, capsys: Capture) -> None:
    host.jobs = [summary(1)]
    assert top(once=True, as_json=True) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    document = json.loads(out)
    assert document["schema"] == 1
    assert document["id"] == "gpt-demo"
    assert len(document["ranks"]) == 8
    gpus = [device["ranks"] for device in document["devices"] if device["kind"] == "gpu"]
    assert gpus == [[n] for n in range(8)]


def test_json_goes_on_until_the_job_has_ended(host: Host, capsys: Capture) -> None:
    host.jobs = [summary(1)]
    host.source = FakeSource(demo(), demo(later_s=1), demo(later_s=2), crashed_demo(), demo())
    assert top(as_json=True, interval_s=0.0) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["state"] for document in documents] == ["running"] * 3 + ["crashed"]


def test_numbers_that_json_cannot_say_are_null(host: Host, capsys: Capture) -> None:
    seen = demo()
    broken = msgspec.structs.replace(seen.job, metrics={"loss": float("nan")})
    host.jobs = [summary(1)]
    host.source = FakeSource(Observation(NOW, broken))
    assert top(once=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == {"loss": None}


def test_a_job_that_can_no_longer_be_read_ends_the_stream_with_a_failure(
    host: Host, capsys: Capture
) -> None:
    host.jobs = [summary(1)]
    source = FakeSource(demo())
    source.lost = "job.json is gone"
    host.source = source
    assert top(as_json=True) == TelemetryError.exit_code == 1
    assert capsys.readouterr().err == "boltmesh: job.json is gone\n"
    assert source.is_closed


def test_an_interrupted_stream_is_told_once_and_goes_on(host: Host, capsys: Capture) -> None:
    answers: list[Observation | InterruptionError] = [
        demo(),
        InterruptionError("cut"),
        InterruptionError("cut"),
        demo(later_s=1),
        crashed_demo(),
    ]

    def read() -> Observation:
        found = answers.pop(0)
        if isinstance(found, InterruptionError):
            raise found
        return found

    host.jobs = [summary(1)]
    host.source.read = read
    assert top(as_json=True, interval_s=0.0) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 3
    assert err == "boltmesh: cut\nboltmesh: connected again.\n"


def test_ctrl_c_ends_the_stream_with_its_own_code(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> Observation:
        raise KeyboardInterrupt

    host.jobs = [summary(1)]
    monkeypatch.setattr(host.source, "read", interrupt)
    assert top(as_json=True) == 130


def test_jobs_are_a_table_or_json(host: Host, capsys: Capture) -> None:
    host.jobs = [summary(1), summary(2, state="crashed")]
    assert jobs() == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()][1:] == [["run", "1"], ["run", "2"]]
    assert jobs(as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert [job["id"] for job in document["jobs"]] == ["job1", "job2"]


def test_no_jobs_are_an_empty_list_and_no_failure(host: Host, capsys: Capture) -> None:
    assert jobs() == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"boltmesh: no job of yours is in {run_dir()}. ")
    assert jobs(as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == []


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({}, "in {folder}"),
        ({"ssh": ["node1"]}, "in {folder} on node1"),
    ],
)
def test_the_folder_that_has_no_job_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path, options: Any, where: str
) -> None:
    """It may be mistyped."""
    folder = tmp_path / "typo"
    monkeypatch.setattr(Hosts, "list_jobs", lambda _: [])
    assert top(once=True, run_dir=folder, **options) == 2
    where = where.format(folder=folder)
    assert capsys.readouterr().err.startswith(f"boltmesh: No job of yours is {where}. Start")
    host = options["ssh"][0] if options else None
    assert jobs(ssh=host, run_dir=folder) == 0
    assert capsys.readouterr().err.startswith(f"boltmesh: no job of yours is {where}. Start")


def test_whoever_stops_reading_causes_no_complaint(tmp_path: Path) -> None:
    code = (
        "from boltmesh.tui.commands.top import top; "
        "raise SystemExit(top(demo=True, as_json=True, interval_s=0.0))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["id"] == "gpt-demo"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(20) == 0


@pytest.mark.parametrize("has_mouse", [True, False])
def test_the_mouse_can_be_left_to_the_terminal_and_choices_are_remembered_here(
    host: Host, monkeypatch: pytest.MonkeyPatch, has_mouse: bool
) -> None:
    from boltmesh.tui.app import DashboardApp
    from boltmesh.tui.settings import settings_path

    seen: list[object] = []

    def run(app: DashboardApp, *, mouse: bool) -> None:
        seen.extend([mouse, app._settings_path])

    monkeypatch.setattr(DashboardApp, "run", run)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    host.jobs = [summary(1)]
    assert top(has_mouse=has_mouse) == 0
    assert seen == [has_mouse, settings_path()]


def test_the_demo_depends_on_no_settings_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from boltmesh.tui.app import DashboardApp

    seen: list[object] = []

    def run(app: DashboardApp, *, mouse: bool) -> None:
        seen.append(app._settings_path)

    monkeypatch.setattr(DashboardApp, "run", run)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert top(demo=True) == 0
    assert seen == [None]


@pytest.mark.parametrize("options", [{"theme": "day"}, {"has_mouse": False}])
def test_what_only_a_screen_has_is_refused_without_one(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert top(demo=True, once=True, **options) == 2
    assert "is for the screen" in capsys.readouterr().err
