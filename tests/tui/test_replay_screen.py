"""A recording on the screen: its time is shown, and moved in by keys."""

import pytest

from boltmesh.tui.panels.help import REPLAY_KEYS
from boltmesh.tui.sources.live import Observation
from tests.tui.samples import NOW, demo
from tests.tui.screens import job_screen, look_again, open_source, screen_text, settle

LENGTH = 120


class FakeRecording:
    """A recording with a look each second, and a clock that tests move."""

    def __init__(self) -> None:
        self.position = NOW + 30.0
        self.speed = 1.0
        self.is_playing = True

    def read(self) -> Observation:
        return demo(later_s=self.position - NOW)

    def close(self) -> None:
        pass

    def span(self) -> tuple[float, float]:
        return NOW, NOW + LENGTH

    def play(self) -> None:
        self.is_playing = True

    def pause(self) -> None:
        self.is_playing = False

    def seek(self, time: float) -> None:
        self.position = min(max(time, NOW), NOW + LENGTH)

    def step(self, by: int) -> None:
        self.is_playing = False
        self.seek(self.position + by)


@pytest.fixture
def recording() -> FakeRecording:
    return FakeRecording()


async def test_the_header_shows_where_the_replay_is(recording: FakeRecording) -> None:
    async with open_source(recording, size=(100, 30)) as pilot:
        assert "replay 1x" in screen_text(pilot.app)
        assert "at 30s of 2m 00s" in screen_text(pilot.app)
        for page in "234567":
            await pilot.press(page)
            assert "replay 1x" in screen_text(pilot.app)


async def test_keys_move_in_time_and_the_screen_follows(recording: FakeRecording) -> None:
    async with open_source(recording, size=(100, 30)) as pilot:
        before = screen_text(pilot.app).splitlines()[1]
        for key, position in (
            ("right_square_bracket", 40),
            ("left_square_bracket", 30),
            ("full_stop", 31),
            ("comma", 30),
            ("left_square_bracket", 20),
        ):
            await pilot.press(key)
            await settle(pilot)
            assert recording.position == NOW + position
        assert screen_text(pilot.app).splitlines()[1] != before
        assert not recording.is_playing
        assert "replay paused" in screen_text(pilot.app)


async def test_space_plays_and_stops_and_the_keys_say_which(recording: FakeRecording) -> None:
    async with open_source(recording, size=(100, 30)) as pilot:
        assert "space pause" in screen_text(pilot.app)
        await pilot.press("space")
        assert not recording.is_playing
        assert "space play" in screen_text(pilot.app)
        assert "paused" not in screen_text(pilot.app).splitlines()[0]
        await pilot.press("space")
        assert recording.is_playing


async def test_the_speed_is_shown(recording: FakeRecording) -> None:
    async with open_source(recording, size=(100, 30)) as pilot:
        await pilot.press("plus", "plus")
        assert "replay 4x" in screen_text(pilot.app)
        await pilot.press("minus", "minus", "minus")
        assert "replay 0.5x" in screen_text(pilot.app)


async def test_a_live_job_has_no_time_to_move_in() -> None:
    from tests.tui.samples import FakeSource

    async with open_source(FakeSource(demo())) as pilot:
        before = screen_text(pilot.app)
        for key in ("left_square_bracket", "full_stop", "plus", "minus"):
            await pilot.press(key)
        await look_again(pilot)
        assert "replay" not in before
        assert screen_text(pilot.app) == before
        assert job_screen(pilot).session.recording is None


def test_help_tells_the_keys_of_a_replay() -> None:
    assert {"[ ]", ", .", "space", "- +"} == {key for key, _ in REPLAY_KEYS}
