"""The characters that drawings are made of: blocks and dots, or plain ASCII.

Everything that has a colour also has a shape or a word, in both sets.
"""

from types import MappingProxyType
from typing import Final

import msgspec

from boltmesh.telemetry.snapshot import MEMORY_KINDS, PHASES

CHUNK_KINDS: Final = ("F", "B", "I", "W")
BUBBLE_PARTS: Final = ("structural", "imbalance", "excess")


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
    shades: str
    """A heat map's cells, lowest first."""
    phases: MappingProxyType[str, str]
    """The pattern of each phase in the stacked bar, and of a pipeline's bubble."""
    kinds: MappingProxyType[str, str]
    """The pattern of each kind of memory in the stacked bar."""
    chunks: MappingProxyType[str, str]
    """The pattern of each kind of pipeline chunk: forward, backward, for input, for weights."""
    idle: str
    bubble: MappingProxyType[str, str]
    """The pattern of each part of a bubble."""
    mark: str
    """A place on a bar."""
    running: str
    finished: str
    failed: str
    absent: str
    equal: str
    differs: str
    up: str
    down: str
    cursor: str


def _patterns(names: tuple[str, ...], characters: str) -> MappingProxyType[str, str]:
    return MappingProxyType(dict(zip(names, characters, strict=True)))


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
    shades="·░▒▓█",
    phases=_patterns((*PHASES, "bubble"), "░:█▓▒▚=#-·"),
    kinds=_patterns(MEMORY_KINDS, "█▓▒=░:▚"),
    chunks=_patterns(CHUNK_KINDS, "░█▓▚"),
    idle="·",
    bubble=_patterns(BUBBLE_PARTS, "█▒░"),
    mark="┃",
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
    shades="0123456789",
    phases=_patterns((*PHASES, "bubble"), "dtFBcoVk-."),
    kinds=_patterns(MEMORY_KINDS, "PGObac-"),
    chunks=_patterns(CHUNK_KINDS, "-=+#"),
    idle=".",
    bubble=_patterns(BUBBLE_PARTS, "#=-"),
    mark="|",
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
