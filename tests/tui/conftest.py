"""A fixture that compares text with a file, and one time zone for all."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from boltmesh.tui.sources.replay import ReplaySource

SNAPSHOTS = Path(__file__).with_name("snapshots")
UPDATE = "BOLTMESH_UPDATE_SNAPSHOTS"


@pytest.fixture(autouse=True)
def _utc(_own_environment: None) -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the colours or the width of whoever runs it."""
    for name in ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def matches_snapshot() -> Callable[[str, str], None]:
    """Return a function that compares text with ``snapshots/NAME.txt``, or ``NAME`` of an SVG.

    With BOLTMESH_UPDATE_SNAPSHOTS=1 it writes the file instead; look at the difference before you
    commit it.
    """

    def compare(name: str, text: str) -> None:
        path = SNAPSHOTS / (name if name.endswith(".svg") else f"{name}.txt")
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        if os.environ.get(UPDATE) == "1":
            SNAPSHOTS.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path.name} is missing: run the test with {UPDATE}=1"
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def replay() -> Iterator[Callable[..., ReplaySource]]:
    """Return a function that opens a recording; all are closed after the test."""
    opened: list[ReplaySource] = []

    def open_(path: Path, **options: Any) -> ReplaySource:
        opened.append(ReplaySource(path, **options))
        return opened[-1]

    yield open_
    for source in opened:
        source.close()
