"""The line of screens: each digit with its name, the present one marked.

The last line: the keys that work here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, facts


class Tab(msgspec.Struct, frozen=True):
    """One screen."""

    key: str
    """The digit that opens it."""
    name: str
    title: str
    short: str
    """At most four letters, for narrow terminals."""


class _PlacedTab(NamedTuple):
    tab: Tab
    text: str
    start: int


def draw_tabs(tabs: Sequence[Tab], current: str, width: int, look: Style) -> Line:
    """The longest form that fits: full titles, short ones, or digits around the present title."""
    # Without colour the marks say which one it is.
    left, right = ("[", "]") if look.glyphs.is_ascii else ("▐", "▌")
    line = Line()
    for tab, text, start in _labels(tabs, current, width):
        if tab.name == current:
            line.pad_to(start - 1).add(left, "accent").add(text, "selected").add(right, "accent")
        else:
            line.pad_to(start).add(text[:1], "accent").add(text[1:], "muted")
    return line.crop(width)


def tab_at(tabs: Sequence[Tab], current: str, width: int, x: int) -> str | None:
    """Return the name of the tab at column ``x``, if there is one."""
    for tab, text, start in _labels(tabs, current, width):
        if start <= x < min(start + len(text), width):
            return tab.name
    return None


def _labels(tabs: Sequence[Tab], current: str, width: int) -> list[_PlacedTab]:
    full = [f"{tab.key} {tab.title}" for tab in tabs]
    medium = [f"{tab.key} {tab.title if len(tab.title) <= 8 else tab.short}" for tab in tabs]
    short = [f"{tab.key} {tab.short}" for tab in tabs]
    tight = [f"{tab.key}{tab.short}" for tab in tabs]
    digits = [f"{tab.key} {tab.title}" if tab.name == current else tab.key for tab in tabs]
    forms = (
        (full, 3),
        (full, 2),
        (medium, 2),
        (medium, 1),
        (short, 2),
        (short, 1),
        (tight, 1),
        (digits, 1),
    )
    for texts, gap in forms:
        # One cell at each end is left for the mark.
        if sum(map(len, texts)) + gap * (len(texts) - 1) + 2 <= width:
            break
    labels, start = [], 1
    for tab, text in zip(tabs, texts, strict=True):
        labels.append(_PlacedTab(tab, text, start))
        start += len(text) + gap
    return labels


def draw_keys(keys: Sequence[tuple[str, str]], width: int) -> Line:
    """Each key with its word, as many of the first as fit."""
    return facts([Line(key, "accent").add(f" {word}", "muted") for key, word in keys], width)
