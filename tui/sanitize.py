"""Makes text that came from a job harmless to a terminal.

A job's name, its events and its metric names are whatever its author wrote. None of it may move the
cursor, set a title, change a colour or reorder what the reader sees.
"""

import re

from boltmesh.telemetry.sanitize import ESCAPE_SEQUENCE

_UNSAFE_IN_JSON = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

MAX_LENGTH = 500
"""Nothing on one line of a terminal is longer; a job's text may be."""


def clean(text: str) -> str:
    """Return ``text`` on one line, without escape sequences, control or direction characters."""
    text = text[:MAX_LENGTH]
    if text.isprintable():
        return text
    text = ESCAPE_SEQUENCE.sub("", text)
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else "?"


def clean_json(encoded: bytes) -> str:
    r"""Return JSON text in which control characters are written as ``\u`` escapes.

    JSON escapes the characters below U+0020 by itself, but passes on U+009B, which many terminals
    take for the start of a control sequence. Such characters occur only inside strings, so the
    result is the same document.
    """
    return _UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded.decode())
