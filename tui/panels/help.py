"""The help page: the content of a screen, its keys, then the keys of every screen."""

import msgspec

from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.style import Style, heading, sentence

Entries = tuple[tuple[str, str], ...]
"""A word and its meaning; an entry with an empty word continues the line above."""


class PageHelp(msgspec.Struct, frozen=True):
    """The help page about one screen; lines of at most 78 columns."""

    about: str
    """The heading: the screen's name and its content."""
    keys: Entries = ()
    """Keys that work there and not on every screen."""
    terms: Entries = ()
    """The words on the screen that need an explanation."""


KEYS: Entries = (
    ("1 - 9", "the screens; tab and shift+tab go to the next and the previous one"),
    ("g NAME", "the screen of that name; a few letters of it are enough"),
    ("0", "the jobs on this host"),
    ("q", "detach; the job goes on"),
    ("esc", "back: from a rank, a filter, a screen"),
    ("j k", "choose a row; also the arrows, page up and down, home, end"),
    ("left right", "the screen to the left, to the right; on a map, a rank"),
    ("l", "what the chosen rank has printed; esc comes back"),
    ("c", "command, hyperparameters and versions of the run"),
    ("h", "charts of the whole run"),
    ("r n v", "experts; the context axis; this run beside another one"),
    ("enter", "the rank that the row is about, in full"),
    ("o", "the other table of the screen, if it has two"),
    ("/", "only the rows with these words; enter keeps it, esc ends it;"),
    ("", "column=text, column>number and column<number look at one column"),
    ("s S", "sort by the next column, sort the other way round"),
    ("space", "pause the screen; nothing is lost meanwhile"),
    ("w y", "write the screen as SVG and text to the working directory; copy it"),
    (": ctrl+p", "all commands by name"),
    ("t", "next theme: night, day, terminal, mono"),
    ("?", "this page"),
    ("mouse", "click a tab, a title to sort, a row or a rank to choose it, twice"),
    ("", "to see it in full; --no-mouse leaves the mouse to the terminal"),
)

REPLAY_KEYS: Entries = (
    ("space", "pause, play"),
    ("[ ]", "10 seconds back, forward"),
    (", .", "one frame back, forward"),
    ("- +", "slower, faster"),
)

DEVICE_TERMS: Entries = (
    ("util", "GPU: share of time in which any kernel ran, by NVML"),
    ("", "CPU: of the rank's process, where 100% is one core"),
    ("SM, tensor", "GPU: busy SMs, and time on tensor cores (Hopper and later)"),
    ("memory", "GPU: used by all processes on it; CPU: resident"),
)
TRAFFIC_TERMS: Entries = (
    ("payload", "bytes that the operators were given in one optimizer step,"),
    ("", "the mean over the ranks"),
    ("busbw", "bytes on the wire while they ran, for a ring algorithm"),
    ("expected", "what the strategy says that a step moves; a difference is"),
    ("", "marked from the third step on"),
)

NOT_KNOWN: Entries = (("-", "not known, which is never the same as zero"),)
WORD_WIDTH = 12


def draw_help(
    page: PageHelp, width: int, height: int, look: Style, *, first: int = 0
) -> list[Line]:
    """The help page from its line ``first`` on."""
    return help_lines(page, width, look)[first:][:height]


def help_lines(page: PageHelp, width: int, look: Style) -> list[Line]:
    """The whole help page of one screen."""
    lines = [heading(page.about, width, look)]
    lines += _entries(page.keys, "accent", width, look)
    lines += _entries((*page.terms, *NOT_KNOWN), "strong", width, look)
    lines += [Line(), heading("keys on every screen", width, look)]
    lines += _entries(KEYS, "accent", width, look)
    lines += [Line(), heading("keys of a replay", width, look)]
    lines += _entries(REPLAY_KEYS, "accent", width, look)
    return lines


def _entries(entries: Entries, role: Role, width: int, look: Style) -> list[Line]:
    room = max(1, width - WORD_WIDTH)
    lines = []
    for word, text in entries:
        for at, part in enumerate(sentence(text, room, look, max_lines=None)):
            start = "" if at else word
            lines.append(Line(start.ljust(WORD_WIDTH), role).join(part).crop(width))
    return lines
