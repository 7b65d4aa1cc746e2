"""Four palettes: night, day, the terminal's own sixteen colours, and none.

The hues are those of Okabe and Ito, which people with any kind of colour vision can tell apart
(https://jfly.uni-koeln.de/color/), made lighter or darker for the background. So there is no
separate palette for the colour-blind; and every colour only repeats what a sign or a word says.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec
from rich.style import Style
from textual.theme import BUILTIN_THEMES, Theme

from boltmesh.tui.render.line import SELECTED, Role


class Palette(msgspec.Struct, frozen=True):
    """Textual's theme for the background, and a style for each role of a drawing."""

    theme: Theme
    styles: Mapping[Role, Style]

    @property
    def name(self) -> str:
        """The name by which the palette is chosen."""
        return self.theme.name


def _palette(theme: Theme, styles: dict[Role, str]) -> Palette:
    parsed = {role: Style.parse(text) for role, text in styles.items()}
    for role, selected in SELECTED.items():
        parsed[selected] = (
            parsed[role]
            + Style.parse(styles["selected"]).without_color
            + Style(bgcolor=Style.parse(styles["selected"]).bgcolor)
        )
    return Palette(theme, MappingProxyType(parsed))


NIGHT: Final = _palette(
    Theme(
        name="night",
        primary="#56b4e9",
        foreground="#c9d1d9",
        background="#11151b",
        surface="#181d25",
        panel="#181d25",
        dark=True,
    ),
    {
        "text": "#c9d1d9",
        "strong": "bold #f0f4f8",
        "muted": "#8793a3",
        "faint": "#475261",
        "accent": "#56b4e9",
        "good": "#3cc09a",
        "warn": "#f0b429",
        "bad": "bold #ff7a66",
        "chart": "#56b4e9",
        "selected": "bold #f0f4f8 on #26303d",
        "data": "#e69f00",
        "transfer": "#f0e442",
        "forward": "#56b4e9",
        "backward": "#2f87c4",
        "communication": "#cc79a7",
        "optimizer": "#22b384",
        "validation": "#e8743b",
        "checkpoint": "#b8a5e3",
        "other": "#6b7787",
        "bubble": "#8a6f9e",
        "heat1": "#44596f",
        "heat2": "#4d7fa6",
        "heat3": "#62a8a0",
        "heat4": "#d9b13b",
        "heat5": "#ff8a5c",
    },
)

DAY: Final = _palette(
    Theme(
        name="day",
        primary="#0072b2",
        foreground="#24292f",
        background="#fbfaf7",
        surface="#f1efe9",
        panel="#f1efe9",
        dark=False,
    ),
    {
        "text": "#24292f",
        "strong": "bold #0b0f14",
        "muted": "#5d6874",
        "faint": "#b4bcc5",
        "accent": "#0072b2",
        "good": "#00785a",
        "warn": "#8f5f00",
        "bad": "bold #b3341c",
        "chart": "#0072b2",
        "selected": "bold #0b0f14 on #dfe6ee",
        "data": "#b87c00",
        "transfer": "#8a8200",
        "forward": "#2b93cf",
        "backward": "#005a8e",
        "communication": "#b05a8c",
        "optimizer": "#00875f",
        "validation": "#c24e00",
        "checkpoint": "#7a63b8",
        "other": "#7d8894",
        "bubble": "#a58bb8",
        "heat1": "#a9bfd4",
        "heat2": "#5f9cc4",
        "heat3": "#2f8079",
        "heat4": "#a97400",
        "heat5": "#b3341c",
    },
)

# Textual's own theme of this kind sets the many variables that its screens refer to.
_TERMINAL_THEME = BUILTIN_THEMES["ansi-dark"]

TERMINAL: Final = _palette(
    dataclasses.replace(_TERMINAL_THEME, name="terminal"),
    {
        "text": "",
        "strong": "bold",
        "muted": "dim",
        "faint": "dim",
        "accent": "cyan",
        "good": "green",
        "warn": "yellow",
        "bad": "bold red",
        "chart": "cyan",
        "selected": "reverse",
        "data": "yellow",
        "transfer": "bright_yellow",
        "forward": "cyan",
        "backward": "blue",
        "communication": "magenta",
        "optimizer": "green",
        "validation": "red",
        "checkpoint": "bright_magenta",
        "other": "dim",
        "bubble": "dim",
        "heat1": "dim",
        "heat2": "blue",
        "heat3": "cyan",
        "heat4": "yellow",
        "heat5": "bold red",
    },
)

MONO: Final = _palette(
    dataclasses.replace(_TERMINAL_THEME, name="mono"),
    dict.fromkeys(NIGHT.styles, "")
    | {
        "strong": "bold",
        "muted": "dim",
        "faint": "dim",
        "accent": "bold",
        "warn": "bold",
        "bad": "bold",
        "selected": "reverse",
        "other": "dim",
        "bubble": "dim",
        "heat1": "dim",
        "heat5": "bold",
    },
)

PALETTES: Final = MappingProxyType(
    {palette.name: palette for palette in (NIGHT, DAY, TERMINAL, MONO)}
)


def choose_palette(name: str | None, *, color_system: str | None, no_color: bool) -> Palette:
    """Return the palette to begin with: what the terminal can show comes before what was asked."""
    if no_color:
        return MONO
    if name is not None:
        return PALETTES[name]
    # Exact colours, mapped to the nearest of sixteen, lose their differences.
    return NIGHT if color_system in {"truecolor", "256"} else TERMINAL
