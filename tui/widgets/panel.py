"""The one widget that everything is painted with: a rectangle that shows a drawing.

Textual's own widgets lay out and re-style every cell that changes; here a refresh is one call of a
pure function and one strip per line, which at 1 Hz is what keeps a viewer light. The drawings never
contain markup, so nothing that a job wrote is ever parsed.
"""

from collections.abc import Callable, Mapping

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget
from typing_extensions import override

from boltmesh.tui.drawing.line import Line, Role, to_ascii

Draw = Callable[[int, int], list[Line]]
"""Width and height in cells to lines, top first; missing lines are blank."""


class Panel(Widget):
    """Shows the lines that ``draw`` gives for the size that the panel has."""

    ALLOW_SELECT = False

    def __init__(self, draw: Draw, *, id: str) -> None:  # noqa: A002 (textual's own name)
        super().__init__(id=id)
        self._draw_lines = draw
        self._styles_by_role: Mapping[Role, Style] = {}
        self._is_ascii = False
        self._strips: list[Strip] = []
        self._strips_size = (-1, -1)

    def repaint(self, styles: Mapping[Role, Style], *, is_ascii: bool) -> None:
        """Draw anew in these styles, and send the terminal only the lines that have changed."""
        before = self._strips
        self._styles_by_role = styles
        self._is_ascii = is_ascii
        width, height = self.size
        is_same_place = self._strips_size == (width, height)
        self._draw(width, height)
        if not is_same_place:
            self.refresh()
            return
        for y in range(max(len(before), len(self._strips))):
            if before[y : y + 1] != self._strips[y : y + 1]:
                self.refresh(Region(0, y, width, 1))

    @override
    def render_line(self, y: int) -> Strip:
        width, height = self.size
        if self._strips_size != (width, height):
            self._draw(width, height)
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(width, self.rich_style)

    def _draw(self, width: int, height: int) -> None:
        self._strips = [
            self._strip(line, width) for line in self._draw_lines(width, height)[:height]
        ]
        self._strips_size = (width, height)

    def _strip(self, line: Line, width: int) -> Strip:
        base = self.rich_style
        segments = [
            Segment(
                to_ascii(text) if self._is_ascii else text,
                base + self._styles_by_role.get(role, Style.null()),
            )
            for text, role in line.crop(width).spans
        ]
        return Strip(segments).adjust_cell_length(width, base)
