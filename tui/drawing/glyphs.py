"""The characters that drawings are made of: blocks and dots, or plain ASCII.

Everything that has a colour also has a shape or a word, in both sets.
"""

from types import MappingProxyType
from typing import Final

import msgspec

from boltmesh.telemetry.snapshot import PHASES


class Glyphs(msgspec.Struct, frozen=True):
    """One set of characters, each one cell wide."""

    is_ascii: bool
    rule: str
    ellipsis: str
    times: str
    dot: str
    """Between two facts on one line."""
    bar_full: str
    bar_half: str
    bar_rest: str
    levels: str
    """A sparkline's columns, lowest first."""
    phases: MappingProxyType[str, str]
    """The pattern of each phase in the stacked bar."""
    running: str
    finished: str
    failed: str
    absent: str
    equal: str
    differs: str
    up: str
    down: str
    cursor: str


def _patterns(characters: str) -> MappingProxyType[str, str]:
    return MappingProxyType(dict(zip(PHASES, characters, strict=True)))


UNICODE: Final = Glyphs(
    is_ascii=False,
    rule="─",
    ellipsis="…",
    times="×",  # noqa: RUF001 (the sign is meant)
    dot="·",
    bar_full="━",
    bar_half="╸",
    bar_rest="─",
    levels="▁▂▃▄▅▆▇█",
    phases=_patterns("░:█▓▒▚=#-"),
    running="●",
    finished="✓",
    failed="✗",
    absent="○",
    equal="✓",
    differs="≠",
    up="↑",
    down="↓",
    cursor="▸",
)

ASCII: Final = Glyphs(
    is_ascii=True,
    rule="-",
    ellipsis="~",
    times="x",
    dot="|",
    bar_full="#",
    bar_half="+",
    bar_rest=".",
    levels="_.-=*#",
    phases=_patterns("dtFBcoVk-"),
    running="*",
    finished="v",
    failed="X",
    absent="o",
    equal="=",
    differs="!",
    up="^",
    down="v",
    cursor=">",
)
