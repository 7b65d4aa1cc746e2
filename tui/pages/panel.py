"""What a page is made of."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look
from boltmesh.tui.layout.region import Region
from boltmesh.tui.state import State
from boltmesh.tui.view import View

Draw = Callable[[int, int], list[Line]]
"""Width and height in cells to lines, top first; missing lines are blank."""


class Panel(NamedTuple):
    """A drawing at its place."""

    name: str
    region: Region
    draw: Draw


class Scene(msgspec.Struct, frozen=True):
    """All that a page is a function of."""

    state: State
    view: View
    look: Look
    width: int
    """Of the whole terminal, which decides on the number of columns."""

    @property
    def title(self) -> int:
        """Lines of a panel's heading."""
        return int(self.look.has_headings)
