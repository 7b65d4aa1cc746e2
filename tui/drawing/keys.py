"""The last line: the keys that work here."""

from collections.abc import Sequence

from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import facts


def draw_keys(keys: Sequence[tuple[str, str]], width: int) -> Line:
    """Each key with its word, as many of the first as fit."""
    return facts([Line(key, "accent").add(f" {word}", "muted") for key, word in keys], width)
