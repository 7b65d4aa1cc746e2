"""What is remembered, and what happens when that cannot be read or written."""

import json
from pathlib import Path

import pytest

from boltmesh.tui.settings import (
    Settings,
    Sorting,
    load,
    save,
    settings_of,
    settings_path,
    view_of,
)
from boltmesh.tui.view import TableView, View

CHOSEN = Settings(
    theme="day",
    screen="ranks",
    sorting={"ranks": Sorting("step time", is_descending=True)},
    heat_figure="memory",
    is_log=True,
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "dashboard.json"
    assert save(path, CHOSEN) is None
    assert load(path) == (CHOSEN, None)
    assert [item.name for item in path.parent.iterdir()] == ["dashboard.json"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_file_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert load(tmp_path / "dashboard.json") == (Settings(), None)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"theme": 3}', b'{"sorting": {"ranks": 1}}', b"\xff\xfe", b"x" * 100_000],
)
def test_a_damaged_file_is_ignored_with_a_note(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "dashboard.json"
    path.write_bytes(content)
    found, note = load(path)
    assert found == Settings()
    assert note is not None
    assert str(path) in note
    assert "ignored" in note
    assert save(path, CHOSEN) is None
    assert load(path) == (CHOSEN, None)


def test_what_a_later_version_adds_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.json"
    path.write_text(json.dumps({"theme": "day", "colour of the bikeshed": "green"}))
    assert load(path) == (Settings(theme="day"), None)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    note = save(tmp_path / "file" / "dashboard.json", CHOSEN)
    assert note is not None
    assert "not written" in note


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dashboard.json"
    save(path, CHOSEN)

    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    note = save(path, Settings())
    assert note is not None
    assert "No space left on device" in note
    assert load(path) == (CHOSEN, None)
    assert [item.name for item in tmp_path.iterdir()] == ["dashboard.json"]


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOLTMESH_SETTINGS_DIR", str(tmp_path))
    assert settings_path() == tmp_path / "dashboard.json"
    monkeypatch.delenv("BOLTMESH_SETTINGS_DIR")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert settings_path() == tmp_path / "config" / "boltmesh" / "dashboard.json"


def test_a_view_is_remembered_without_what_is_of_one_job_only() -> None:
    view = View(
        metric="loss",
        heat_figure="memory",
        is_log=True,
        is_paused=True,
        rank=3,
        tables={
            "ranks": TableView(
                first=3, selected=4, sort="step time", is_descending=True, filter="dead"
            ),
            "events": TableView(filter="warning"),
        },
    )
    assert settings_of(view, theme="day", screen="ranks") == CHOSEN
    assert view_of(CHOSEN) == View(
        heat_figure="memory",
        is_log=True,
        tables={"ranks": TableView(sort="step time", is_descending=True)},
    )
