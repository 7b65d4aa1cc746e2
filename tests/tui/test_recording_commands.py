"""``record``, ``top --replay``, ``export-metrics`` and ``--on-alert``: output and exit codes."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from boltmesh.cli import run_command
from boltmesh.telemetry.reader.reader import JobSummary
from boltmesh.tui.commands import targets
from boltmesh.tui.sources.live import Observation, Source
from boltmesh.tui.sources.replay import ReplaySource
from tests.tui.exposition import parse
from tests.tui.played import look, write
from tests.tui.samples import NOW, FakeSource, job, rank, step, summary

Capture = pytest.CaptureFixture[str]
Replay = Callable[..., ReplaySource]


class Host:
    """One job, which the commands find instead of this host's."""

    def __init__(self) -> None:
        self.source: Source = FakeSource(look(3, last=3))
        self.asked: list[str | None] = []

    def list_jobs(self, run_dir: Path | None) -> Sequence[JobSummary]:
        return [summary(1)]

    def attach(self, job: str | None, run_dir: Path | None) -> Source:
        self.asked.append(job)
        return self.source


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    host = Host()
    monkeypatch.setattr(targets, "list_jobs", host.list_jobs)
    monkeypatch.setattr(targets, "attach", host.attach)
    monkeypatch.chdir(tmp_path)
    return host


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write(tmp_path / "job.rec", *(look(second, last=9) for second in range(10)))


def run(*arguments: str) -> int:
    return run_command(list(arguments))


# --- record


def test_a_recording_says_where_it_is_and_how_to_see_it(
    host: Host, capsys: Capture, replay: Replay
) -> None:
    host.source = FakeSource(*(look(second, last=3) for second in range(4)))
    assert run("record", "my job.rec", "--interval", "0.1") == 0
    out, err = capsys.readouterr()
    size = Path("my job.rec").stat().st_size
    first, last = err.splitlines()
    assert out == ""
    assert first == "boltmesh: recording into my job.rec; Ctrl-C ends it, the job goes on."
    assert last == (
        f"boltmesh: my job.rec: It has 4 frames, {size:,} bytes. "
        f"See it with: boltmesh top --replay 'my job.rec'"
    )
    assert replay(Path("my job.rec")).num_frames == 4
    assert host.asked == [None]


def test_the_job_comes_before_the_file(host: Host, capsys: Capture) -> None:
    assert run("record", "abc", "a.rec") == 0
    assert host.asked == ["abc"]
    assert Path("a.rec").is_file()
    assert "Ctrl-C" not in capsys.readouterr().err, "a job that is over is recorded at once"


def test_ctrl_c_ends_a_recording_and_is_no_failure(
    host: Host, capsys: Capture, replay: Replay
) -> None:
    class Interrupted(FakeSource):
        def read(self) -> Observation:
            seen = super().read()
            if seen.time > NOW + 1:
                raise KeyboardInterrupt
            return seen

    host.source = Interrupted(look(1), look(2))
    assert run("record", "a.rec", "--interval", "0.1") == 0
    assert "1 frame, " in capsys.readouterr().err
    assert replay(Path("a.rec")).read() == look(1)


def test_a_job_that_goes_away_leaves_what_was_recorded(
    host: Host, capsys: Capture, replay: Replay
) -> None:
    class Going(FakeSource):
        def read(self) -> Observation:
            seen = super().read()
            self.lost = "job.json is gone" if seen.time > NOW + 1 else None
            return seen

    host.source = Going(look(1), look(2), look(3))
    assert run("record", "a.rec", "--interval", "0.1") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "boltmesh: job.json is gone"
    assert replay(Path("a.rec")).num_frames == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["record"], "Missing argument '[JOB] FILE'."),
        (["record", "a", "b", "c"], "record takes a job and a file, and not also c."),
        (["record", "taken"], "taken exists. Name another file, or add --force to replace it."),
        (["record", "absent/a.rec"], "absent/a.rec cannot be made: No such file or directory."),
        (["record", "a.rec", "--interval", "0"], "Invalid value for '--interval'"),
        (["record", "a.rec", "--for", "0"], "Invalid value for '--for'"),
        (["top", "--replay", "absent", "--once"], "absent cannot be read: No such file"),
        (["top", "--replay", "taken", "--once"], "taken is no recording."),
        (["top", "--replay", "taken"], "The dashboard needs a terminal."),
        (["top", "--at", "3", "--once"], "--at is a moment of a recording. Add --replay FILE."),
        (["top", "abc", "--replay", "taken", "--once"], "--replay shows taken alone."),
        (["top", "--demo", "--replay", "taken", "--once"], "Leave out --demo."),
        (["top", "--replay", "taken", "--json", "--on-alert", "x"], "Leave out --replay."),
        (["top", "--once", "--on-alert", "x"], "--on-alert watches a job that runs."),
        (["top", "--demo", "--json", "--on-alert", "x"], "Leave out --demo."),
        (["export-metrics", "--format", "xml"], "Use prometheus, openmetrics, csv."),
        (["export-metrics", "--table", "steps"], "Add --format csv."),
        (["export-metrics", "--format", "csv", "--table", "x"], "Use steps, metrics, collectives"),
        (["export-metrics", "--every", "5"], "Add --output FILE."),
        (["export-metrics", "--output", "absent/x"], "absent/x cannot be written: No such file"),
        (["export-metrics", "--output", "."], "is no plain file."),
        (["export-metrics", "--replay", "taken"], "taken is no recording."),
        (["export-metrics", "abc", "--replay", "taken"], "--replay shows taken alone."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    host: Host, capsys: Capture, arguments: list[str], says: str
) -> None:
    Path("taken").write_text("precious")
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
    assert Path("taken").read_text() == "precious"
    assert os.listdir() == ["taken"]


# --- top --replay


def test_once_is_the_last_frame_or_the_moment_that_is_asked_for(
    recorded: Path, capsys: Capture
) -> None:
    assert run("top", "--replay", str(recorded), "--once", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["global_step"], document["state"]) == (9, "finished")
    assert run("top", "--replay", str(recorded), "--once", "--json", "--at", "4.5") == 0
    assert json.loads(capsys.readouterr().out)["global_step"] == 4
    assert run("top", "--replay", str(recorded), "--once") == 0
    out, err = capsys.readouterr()
    assert "finished" in out
    assert err == ""


def test_json_is_a_line_for_each_frame_from_the_moment_on(recorded: Path, capsys: Capture) -> None:
    for options, first in (([], 0), (["--at", "6"], 6)):
        assert run("top", "--replay", str(recorded), "--json", *options) == 0
        documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [document["global_step"] for document in documents] == list(range(first, 10))


def test_a_moment_beyond_the_end_is_said_to_be_the_end(recorded: Path, capsys: Capture) -> None:
    assert run("top", "--replay", str(recorded), "--once", "--json", "--at", "1000") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["global_step"] == 9
    assert err == f"boltmesh: {recorded} ends after 9.0 s; this is its end.\n"


def test_a_torn_recording_is_shown_up_to_its_end_with_a_note(
    recorded: Path, capsys: Capture
) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-3])
    assert run("top", "--replay", str(recorded), "--once", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["global_step"] == 8
    assert err == (
        "boltmesh: the recording is played up to 9 frames: the stream ends within a frame.\n"
    )


# --- export-metrics


def test_figures_go_to_stdout_or_into_a_file(host: Host, capsys: Capture) -> None:
    assert run("export-metrics") == 0
    out, err = capsys.readouterr()
    assert parse(out)["boltmesh_job_steps_total"].value() == 3
    assert err == ""
    assert run("export-metrics", "abc", "--output", "a.prom") == 0
    assert capsys.readouterr().out == ""
    assert Path("a.prom").read_text() == out
    assert host.asked == [None, "abc"]


def test_the_file_is_renewed_until_the_job_ends(host: Host) -> None:
    host.source = FakeSource(*(look(second, last=4) for second in range(1, 6)))
    assert run("export-metrics", "--output", "a.prom", "--every", "0.1") == 0
    assert parse(Path("a.prom").read_text())["boltmesh_job_steps_total"].value() == 4


def test_tables_come_as_csv(host: Host, capsys: Capture) -> None:
    for table, title in (
        ("steps", "job,rank,index"),
        ("metrics", "job,metric,"),
        ("collectives", "job,time,rank,axis"),
        ("ranks", "job,time,rank,pipeline"),
    ):
        assert run("export-metrics", "--format", "csv", "--table", table) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(title)
        assert len(lines) > 1
    assert run("export-metrics", "--format", "csv") == 0
    assert capsys.readouterr().out.startswith("job,rank,index")


def test_a_recording_is_exported_whole(recorded: Path, capsys: Capture) -> None:
    assert run("export-metrics", "--replay", str(recorded)) == 0
    assert parse(capsys.readouterr().out)["boltmesh_job_steps_total"].value() == 9
    assert run("export-metrics", "--replay", str(recorded), "--at", "5", "--format", "csv") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 * 5


# --- restarts


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize(
    "command",
    [
        ("record", "a.rec"),
        ("export-metrics", "--output", "a.prom", "--every", "0.1"),
        ("top", "--json"),
    ],
)
def test_a_watcher_goes_on_over_a_failure_that_is_followed_by_a_restart(
    host: Host, command: tuple[str, ...], goes_on: bool
) -> None:
    host.source = source = FakeSource(
        look(1),
        look(1),
        look(2, state="crashed", is_restarting=goes_on),
        look(3, started=NOW + 2),
        look(4, started=NOW + 2, last=4),
    )
    interval = () if "--every" in command else ("--interval", "0.1")
    assert run(*command, *interval) == 0
    assert source.num_reads == (5 if goes_on else 3)


# --- --on-alert without a screen


def test_alerts_are_said_and_given_to_the_command_until_the_job_ends(
    host: Host, capsys: Capture, tmp_path: Path
) -> None:
    def seen(second: int, loss: float, state: str = "running") -> Observation:
        steps = (step(second, loss=loss, end_time=NOW + second),)
        snapshot = job(ranks=(rank(0, steps=steps),), state=state, cause="rank 0 was killed.")
        return Observation(time=NOW + second, job=snapshot)

    host.source = FakeSource(
        seen(1, 2.0), seen(2, math.nan), seen(3, math.nan), seen(4, 2.0), seen(5, 2.0, "crashed")
    )
    hook = f'echo "$BOLTMESH_ALERT_STATE $BOLTMESH_ALERT_MESSAGE" >> {tmp_path}/alerts'
    assert run("top", "--json", "--interval", "0.1", "--on-alert", hook) == 0
    out, err = capsys.readouterr()
    assert len([json.loads(line) for line in out.splitlines()]) == 5
    assert err.splitlines() == [
        "boltmesh: alert: loss is nan at step 3, on rank 0",
        "boltmesh: alert is over: loss is finite again at step 5",
        "boltmesh: alert: the job has crashed: rank 0 was killed.",
    ]
    assert (tmp_path / "alerts").read_text().splitlines() == [
        "raised loss is nan at step 3, on rank 0",
        "resolved loss is finite again at step 5",
        "raised the job has crashed: rank 0 was killed.",
    ]


def test_a_command_that_fails_is_said_and_stops_nothing(host: Host, capsys: Capture) -> None:
    good = msgspec.structs.replace(look(1), job=job(ranks=(rank(0, steps=(step(0),)),)))
    broken = job(ranks=(rank(0, steps=(step(1, loss=math.nan),)),))
    over = msgspec.structs.replace(broken, state="finished")
    host.source = FakeSource(good, Observation(NOW + 5, broken), Observation(NOW + 6, over))
    assert (
        run("top", "--json", "--interval", "0.1", "--on-alert", "echo no network >&2; exit 7") == 0
    )
    err = capsys.readouterr().err
    assert "boltmesh: --on-alert: the command ended with code 7: no network\n" in err


# --- real processes


FOLLOW = """
import sys, time
from pathlib import Path
from boltmesh.tui.commands import targets
from boltmesh.tui.commands.record import record
from tests.tui.played import look

class Source:
    second = 0
    def read(self):
        self.second += 1
        return look(self.second)
    def close(self):
        pass

targets.open_source = lambda *_, **__: Source()
raise SystemExit(record(None, Path(sys.argv[1]), interval_s=0.01))
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_recorder_that_is_stopped_or_killed_leaves_a_file_that_plays(
    sent: signal.Signals, code: int, tmp_path: Path, replay: Replay
) -> None:
    path = tmp_path / "a.rec"
    process = subprocess.Popen(
        [sys.executable, "-c", FOLLOW, str(path)],
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        deadline = time.monotonic() + 300
        try:
            while not path.exists() or path.stat().st_size < 20_000:
                assert time.monotonic() < deadline
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                time.sleep(0.01)
            process.send_signal(sent)
            assert process.wait(60) == code
        finally:
            process.kill()
    source = replay(path)
    for number, seen in enumerate(source.frames(), start=1):
        assert seen == look(number)
    assert number == source.num_frames
    if sent == signal.SIGINT:
        assert source.note is None


@pytest.mark.parametrize(
    "arguments", [["export-metrics", "--replay"], ["top", "--once", "--replay"]]
)
def test_looking_back_loads_no_training_library_and_no_screen(
    arguments: list[str], recorded: Path
) -> None:
    code = (
        "import sys; from boltmesh.cli import run_command\n"
        f"assert run_command({[*arguments, str(recorded)]!r}) == 0\n"
        "unwanted = {'torch', 'lightning', 'numpy', 'textual', 'pynvml', 'omegaconf'}\n"
        "print(sorted(unwanted & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
