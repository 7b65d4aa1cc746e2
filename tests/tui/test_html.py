"""``boltmesh report``: one page of a run that is whole, safe, and needs nothing else."""

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from boltmesh.telemetry.snapshot import Event, ExpertLoad, MetricPoint, PhaseTime
from boltmesh.tui import units
from boltmesh.tui.commands.export import write_report
from boltmesh.tui.export.html import html_page
from boltmesh.tui.metrics.figures import figures
from boltmesh.tui.metrics.pipelines import bubble
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from tests.tui.played import look, write
from tests.tui.samples import NOW, crashed_demo, demo, job, rank, step, total

EVIL = '<script>alert("x")</script>\x1b[2J&'
VOID = {"meta", "!doctype"}


class _Page(HTMLParser):
    """Collects tags, and fails where one is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in {"src", "href"}]
        if tag not in VOID | {"br"}:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def end(self) -> None:
        self.close()
        assert not self._open


def _read(text: str) -> _Page:
    page = _Page()
    page.feed(text)
    page.end()
    return page


@pytest.mark.parametrize("seen", [demo(), crashed_demo(), Observation(NOW, job(ranks=()))])
def test_a_page_is_whole_and_loads_nothing(seen: Observation) -> None:
    text = html_page(fold(None, seen))
    page = _read(text)
    assert not page.links
    assert "script" not in page.tags
    assert "Content-Security-Policy" in text
    for svg in text.split("<svg")[1:]:
        ET.fromstring("<svg" + svg.partition("</svg>")[0] + "</svg>")


def test_a_page_has_what_the_screens_have() -> None:
    state = fold(None, demo())
    text, ratio = html_page(state), units.share(figures(state).bubble_ratio.value)
    for title in (
        "Headline figures", "Charts", "Step time", "Bubble of the pipeline", "Ranks", "Memory",
        "Communication", "Config", "Events", "Output",
    ):  # fmt: skip
        assert f"<h2>{title}" in text
    for words in (ratio, "bubble_ratio", "val_loss", "<polyline", "9.87 GB", "as expected"):
        assert words in text
    found = bubble(state)
    assert found is not None
    last = found.rows[-1]
    for name, parts in [("mean", found.mean), (f"rank {last.rank}", last.parts)]:
        shares = (parts.measured, parts.ideal, parts.structural, parts.imbalance, parts.excess)
        assert "".join(f"<td>{each}</td>" for each in (name, *map(units.share, shares))) in text
    crashed = html_page(fold(None, crashed_demo()))
    assert '<span class="state bad">crashed</span>' in crashed
    assert "was killed by SIGKILL" in crashed


def test_tables_have_the_numbers_of_the_telemetry() -> None:
    load = ExpertLoad("blocks.0.moe", (30, 10), (3, 1), dropped=5)
    small = total("data", bytes_per_step=1000.0)
    large = total("expert", "alltoall_base", bytes_per_step=5e6)
    phases = (PhaseTime("forward", 0.3), PhaseTime("communication", 0.1))
    each = rank(0, steps=tuple(step(at, seconds=0.4, phases=phases) for at in range(20)))
    each = msgspec.structs.replace(each, experts=(load,), collectives=(small, large))
    text = html_page(fold(None, Observation(NOW, job(ranks=(each,)))))
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    assert ["blocks.0.moe", "1.5000", "0.5000", "0", "12.5%", "40"] in cells
    assert ["forward", "300 ms", "75.0%"] in cells
    (first, second) = [row for row in cells if row[:1] in (["expert"], ["data"]) and len(row) == 6]
    assert first[:3] == ["expert", "all_to_all", "5.00 MB"]
    assert second[:3] == ["data", "all_reduce", "1.00 kB"]


def test_rates_of_a_job_that_has_ended_have_their_age() -> None:
    ended = Observation(NOW, job(state="finished", updated=NOW - 90))
    assert "<td>2,048, 1m 30s ago</td>" in html_page(fold(None, ended))
    assert "<td>2,048</td>" in html_page(fold(None, Observation(NOW, job())))


def test_texts_of_a_job_are_escaped() -> None:
    seen = job(
        name=EVIL,
        hyperparameters={EVIL: EVIL},
        ranks=(rank(0, host=EVIL, device=EVIL, error=EVIL, output=(f"12:00:00 {EVIL}",)),),
        events=(Event(NOW, 0, "warning", EVIL),),
        history=(MetricPoint(EVIL, 1, 1.0), MetricPoint(EVIL, 2, float("nan"))),
        state="failed",
        cause=EVIL,
    )
    text = html_page(fold(None, Observation(NOW, seen)))
    assert "script" not in _read(text).tags
    assert "\x1b" not in text


def test_a_file_is_replaced_only_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from boltmesh.tui.commands import targets
    from tests.tui.samples import FakeSource

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(targets, "open_source", lambda *_, **__: FakeSource(demo(), demo()))
    assert write_report() == 0
    assert (tmp_path / "gpt-demo.html").read_text().startswith("<!doctype html>")
    assert write_report() == 2
    assert "exists" in capsys.readouterr().err
    assert write_report(output=Path("gpt-demo.html")) == 0


@pytest.mark.parametrize("job_id", ["../planted", "/tmp/planted", "", ".hidden", "a/b"])
def test_a_recording_chooses_no_place_for_the_page(
    job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if job_id.startswith("/"):
        job_id = str(tmp_path / "planted")
    write(tmp_path / "a.rec", look(5, id=job_id))
    assert write_report(replay=tmp_path / "a.rec") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{job_id!r} is no id of a job." in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "a.rec"]


BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is on the PATH")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    """The real thing parses it, draws the charts, and finds nothing that is forbidden."""
    page = tmp_path / "run.html"
    page.write_text(html_page(fold(None, demo())), encoding="utf-8")
    command = [
        str(BROWSER), "--headless", "--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,3000",
        "--enable-logging=stderr", "--v=0",
    ]  # fmt: skip
    picture = tmp_path / "page.png"
    done = subprocess.run(
        [*command, f"--screenshot={picture}", page.as_uri()],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr  # nothing was forbidden, no script failed
    assert picture.stat().st_size > 50_000
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    seen, written = _read(done.stdout).tags, _read(page.read_text(encoding="utf-8")).tags
    for tag, least in (("polyline", 5), ("svg", 5), ("tr", 40)):
        assert seen.count(tag) == written.count(tag) >= least
