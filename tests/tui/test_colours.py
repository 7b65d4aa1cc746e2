"""What a terminal is sent: few colours where it has few, none where none are wanted."""

from typing import Any, get_args

import pytest
from rich.color import ColorType
from textual.app import App

from boltmesh.tui.app import DashboardApp
from boltmesh.tui.render.line import Role
from boltmesh.tui.theme import MONO, NIGHT, PALETTES, TERMINAL, Palette, choose_palette
from tests.tui.samples import FakeSource, crashed_demo, demo
from tests.tui.screens import open_app


@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
def test_every_role_has_a_style_in_every_palette(palette: Palette) -> None:
    assert set(palette.styles) == set(get_args(Role))


@pytest.mark.parametrize(
    ("color_system", "no_color", "asked", "palette"),
    [("truecolor", False, None, "night"), ("256", False, None, "night"),
     ("standard", False, None, "terminal"), (None, False, None, "terminal"),
     ("truecolor", True, None, "mono"), ("truecolor", True, "day", "mono"),
     ("standard", False, "day", "day")],
)  # fmt: skip
def test_the_palette_follows_the_terminal_and_the_user(
    color_system: str | None, no_color: bool, asked: str | None, palette: str
) -> None:
    chosen = choose_palette(asked, color_system=color_system, no_color=no_color)
    assert chosen.name == palette


def _colours(app: App[Any]) -> set[ColorType]:
    styles = [
        segment.style
        for strip in app.screen._compositor.render_strips()
        for segment in strip
        if segment.style is not None
    ]
    colours = [colour for style in styles for colour in (style.color, style.bgcolor)]
    return {colour.type for colour in colours if colour is not None}


async def test_the_terminals_own_palette_uses_nothing_but_its_sixteen_colours() -> None:
    async with open_app(crashed_demo(), palette=TERMINAL.name) as pilot:
        assert _colours(pilot.app) <= {ColorType.DEFAULT, ColorType.STANDARD}


async def test_no_color_means_no_colour_and_the_theme_key_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with open_app(crashed_demo()) as pilot:
        assert isinstance(pilot.app, DashboardApp)
        await pilot.press("t")
        assert pilot.app.palette is MONO
        assert _colours(pilot.app) <= {ColorType.DEFAULT}


def test_an_unknown_theme_of_textual_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    app = DashboardApp(FakeSource(demo()), palette=NIGHT.name)
    app.theme = "nord"
    assert app.palette is TERMINAL


def _luminance(hexadecimal: str) -> float:
    channels = [int(hexadecimal[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", ["night", "day"])
def test_words_stand_out_from_their_background(name: str) -> None:
    """WCAG 2.2 asks for a contrast of 4.5 for text, https://www.w3.org/TR/WCAG22/#contrast-minimum."""
    palette = PALETTES[name]
    assert palette.theme.background is not None
    ground = _luminance(palette.theme.background)
    for role in ("text", "strong", "muted", "accent", "good", "warn", "bad"):
        colour = palette.styles[role].color
        assert colour is not None
        assert colour.triplet is not None
        light = _luminance(colour.triplet.hex)
        high, low = max(light, ground), min(light, ground)
        assert (high + 0.05) / (low + 0.05) >= 4.5, role
