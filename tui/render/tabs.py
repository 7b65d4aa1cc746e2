"""The line of tabs, one per screen, and the line of keys at the bottom."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, facts

SHORT_LETTERS = 4


class Tab(msgspec.Struct, frozen=True):
    """One screen in the line of tabs."""

    name: str
    title: str
    key: str = ""
    """The digit or letter that opens it. Empty: it has none, and is reached by ``g`` and tab."""
    short_title: str = ""
    """For narrow terminals, at most four letters. Empty: the first four of the title."""
    is_listed: bool = True
    """Whether it is in the line of tabs; others are reached by their key, ``g`` and ``:``."""

    @property
    def short(self) -> str:
        """The title in at most four letters."""
        return self.short_title or self.title[:SHORT_LETTERS].rstrip()


def fits(tabs: Sequence[Tab], width: int) -> bool:
    """Say whether all tabs have their full titles in a line of that width."""
    return sum(len(_text(tab, tab.title)) + 2 for tab in tabs) <= width


class _PlacedTab(NamedTuple):
    tab: Tab
    """Opened by a click."""
    text: str
    start: int
    is_arrow: bool = False
    """It represents tabs that do not fit, and opens the nearest of them."""


def draw_tabs(
    tabs: Sequence[Tab], current: str, width: int, look: Style, *, empty: Collection[str] = ()
) -> Line:
    """The longest form that fits: full titles, short ones, keys, or those around the current one.

    Args:
        tabs: All of them, in their order.
        current: The name of the one that is shown.
        width: In cells.
        look: How to draw.
        empty: Names of screens that have nothing to show for this job; they are drawn muted.
    """
    # Without colour the marks show which one it is.
    left, right = ("[", "]") if look.glyphs.is_ascii else ("▐", "▌")
    line = Line()
    for tab, text, start, is_arrow in _place(tabs, current, width):
        if is_arrow:
            line.pad_to(start).add(text, "accent")
        elif tab.name == current:
            line.pad_to(start - 1).add(left, "accent").add(text, "selected").add(right, "accent")
        else:
            num_letters = len(tab.key) if tab.name not in empty else 0
            line.pad_to(start).add(text[:num_letters], "accent").add(text[num_letters:], "muted")
    return line.crop(width)


def tab_at(tabs: Sequence[Tab], current: str, width: int, x: int) -> str | None:
    """Return the name of the tab at column ``x``, if there is one."""
    for tab, text, start, _ in _place(tabs, current, width):
        if start <= x < min(start + len(text), width):
            return tab.name
    return None


def _place(tabs: Sequence[Tab], current: str, width: int) -> list[_PlacedTab]:
    for texts, gap in _forms(tabs, current):
        # One cell at each end is left for the mark.
        if sum(map(len, texts)) + gap * (len(texts) - 1) + 2 <= width:
            break
    else:
        return _around(tabs, current, width)
    placed, start = [], 1
    for tab, text in zip(tabs, texts, strict=True):
        placed.append(_PlacedTab(tab, text, start))
        start += len(text) + gap
    return placed


def _forms(tabs: Sequence[Tab], current: str) -> Iterator[tuple[list[str], int]]:
    """Yield the texts of all tabs and the cells between them, the longest form first."""
    full = [_text(tab, tab.title) for tab in tabs]
    medium = [_text(tab, tab.title if len(tab.title) <= 8 else tab.short) for tab in tabs]
    short = [_text(tab, tab.short) for tab in tabs]
    yield from ((full, 3), (full, 2), (medium, 2), (medium, 1), (short, 2), (short, 1))
    yield [tab.key + tab.short for tab in tabs], 1
    if all(tab.key for tab in tabs):
        yield [_text(tab, tab.title) if tab.name == current else tab.key for tab in tabs], 1


def _around(tabs: Sequence[Tab], current: str, width: int) -> list[_PlacedTab]:
    """Place the current tab and its neighbours, as many as fit, between two arrows."""
    texts = [_text(tab, tab.short) for tab in tabs]
    at = next((place for place, tab in enumerate(tabs) if tab.name == current), 0)
    first = last = at
    room = width - 2 - len(texts[at]) - 2 * len("< ")
    while True:
        # The side that shows fewer is next, so that the current tab stays in the middle.
        sides = [last + 1, first - 1] if last - at <= at - first else [first - 1, last + 1]
        fitting = [
            place for place in sides if 0 <= place < len(tabs) and len(texts[place]) + 2 <= room
        ]
        if not fitting:
            break
        first, last = min(first, fitting[0]), max(last, fitting[0])
        room -= len(texts[fitting[0]]) + 2
    placed, start = [], 1
    if first > 0:
        placed.append(_PlacedTab(tabs[first - 1], "<", 0, is_arrow=True))
        start = 3
    for place in range(first, last + 1):
        placed.append(_PlacedTab(tabs[place], texts[place], start))
        start += len(texts[place]) + 2
    if last < len(tabs) - 1:
        placed.append(_PlacedTab(tabs[last + 1], ">", start, is_arrow=True))
    return placed


def _text(tab: Tab, title: str) -> str:
    return f"{tab.key} {title}".lstrip()


def draw_keys(keys: Sequence[tuple[str, str]], width: int) -> Line:
    """Each key with its word, as many of the first as fit."""
    return facts([Line(key, "accent").add(f" {word}", "muted") for key, word in keys], width)
