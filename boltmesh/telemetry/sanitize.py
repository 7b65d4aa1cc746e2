"""Makes a job's strings safe to show: they cannot steer a terminal, whatever their source."""

import re
from collections.abc import Mapping

from boltmesh.process import INVISIBLE

ESCAPE_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor, modes
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x9c|\x1b\\|$)"  # titles, clipboard, devices
    r"|\x1b[ -/]*[0-~]",  # two-character escapes
    re.DOTALL,
)
_UNSAFE = re.compile(rf"[\x00-\x1f\x7f-\x9f\ud800-\udfff{INVISIBLE}]+")
"""Control characters of both sets, invisible marks, and lone surrogates, which have no encoding."""

MAX_TEXT = 500
MAX_ENTRIES = 200


def clean(value: object, limit: int = MAX_TEXT) -> str:
    """Return one line of visible text, at most ``limit`` characters long; colours are left out."""
    text = value if isinstance(value, str) else str(value)
    text = _UNSAFE.sub(" ", ESCAPE_SEQUENCE.sub("", text[: 4 * limit])).strip()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clean_mapping(values: Mapping[str, object]) -> dict[str, str]:
    """Return the first entries of a mapping, names and values cleaned."""
    return {clean(name, 100): clean(values[name]) for name in list(values)[:MAX_ENTRIES]}
