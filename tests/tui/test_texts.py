"""Output of the ranks, config of the run, and the screen as a file and on the clipboard."""

from pathlib import Path

import msgspec
import pytest

from boltmesh.tui.pages.registry import PAGES
from tests.tui.samples import crashed_demo, demo
from tests.tui.screens import job_screen, open_app, screen_text, wait_until


async def test_l_shows_the_output_of_the_chosen_rank_and_esc_comes_back() -> None:
    async with open_app(crashed_demo(), size=(100, 30)) as pilot:
        await pilot.press("8", "right", "l")
        text = screen_text(pilot.app)
        assert "rank 1 of 8" in text
        assert "rank 0 of 8" not in text
        assert "Connection closed" in text
        await pilot.press("escape")
        assert job_screen(pilot).page is PAGES["mesh"]


async def test_output_can_be_filtered_like_every_table() -> None:
    async with open_app(demo(), size=(100, 30)) as pilot:
        await pilot.press("l", "slash", *"4,100", "enter")
        # The row, and the row in full.
        await wait_until(pilot, lambda: screen_text(pilot.app).count("is done") == 2)


async def test_a_job_without_output_says_so() -> None:
    seen = demo()
    ranks = tuple(msgspec.structs.replace(rank, output=()) for rank in seen.job.ranks)
    seen = msgspec.structs.replace(seen, job=msgspec.structs.replace(seen.job, ranks=ranks))
    async with open_app(seen) as pilot:
        await pilot.press("l")
        assert "No output of this job is kept" in screen_text(pilot.app)


async def test_c_shows_the_config_and_esc_comes_back() -> None:
    async with open_app(demo(), size=(100, 30)) as pilot:
        await pilot.press("3", "c")
        text = screen_text(pilot.app)
        assert "boltmesh fit gpt.yaml" in text
        assert "working directory" in text
        await pilot.press("escape")
        assert job_screen(pilot).page is PAGES["communication"]


async def test_w_writes_the_screen_and_never_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "120000")
    async with open_app(demo(), size=(80, 24)) as pilot:
        await pilot.press("3")
        shown = screen_text(pilot.app)
        await pilot.press("w")
        assert "written" in screen_text(pilot.app)
        svg, text = sorted(tmp_path.iterdir())
        assert svg.read_text().startswith('<svg xml:space="preserve"')
        assert text.read_text().splitlines()[5].rstrip() == shown.splitlines()[5].rstrip()
        await pilot.press("w")
        assert "not written" in screen_text(pilot.app)


async def test_y_sends_the_text_to_the_clipboard() -> None:
    async with open_app(demo(), size=(80, 24)) as pilot:
        await pilot.press("3", "y")
        assert "communication per step" in pilot.app.clipboard
