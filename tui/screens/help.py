"""The help page."""

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from typing_extensions import override

from boltmesh.tui.layout.page import Panel
from boltmesh.tui.layout.region import Region
from boltmesh.tui.panels.help import PageHelp, draw_help, help_lines
from boltmesh.tui.render.tabs import draw_keys
from boltmesh.tui.screens.base import PanelScreen


class HelpScreen(PanelScreen):
    """Explains the screen that was left, and lists all keys; scrolls where the terminal is short.

    Args:
        about: Help about the screen that it was opened from.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,enter,space", "dismiss_page", "back"),
        Binding("down,j", "scroll(1)", "down"),
        Binding("up,k", "scroll(-1)", "up"),
        Binding("pagedown", "turn(1)", "page down"),
        Binding("pageup", "turn(-1)", "page up"),
        Binding("home", "scroll(-10000)", "begin"),
        Binding("end", "scroll(10000)", "end"),
    ]

    def __init__(self, about: PageHelp) -> None:
        super().__init__()
        self._about = about
        self._first = 0

    @override
    def panels(self) -> Sequence[Panel]:
        width, height = self.size
        room = self._room()
        margin = (width - room) // 2
        page = Region(margin, 0, room, max(1, height - 1))
        keys = Region(margin, height - 1, room, 1)
        panels = [
            Panel(
                "page",
                page,
                lambda width, height: draw_help(
                    self._about, width, height, self.look, first=self._first
                ),
            ),
            Panel(
                "keys",
                keys,
                lambda width, _: [draw_keys((("esc", "back"), ("j k", "scroll")), width)],
            ),
        ]
        return panels if height > 1 else panels[:1]

    def _room(self) -> int:
        """Columns of a line, without the margins."""
        width = self.size.width
        return width - 2 if width > 2 else width

    def on_mouse_scroll_down(self) -> None:
        """Scroll on by a line."""
        self.action_scroll(1)

    def on_mouse_scroll_up(self) -> None:
        """Scroll back by a line."""
        self.action_scroll(-1)

    def action_dismiss_page(self) -> None:
        """Go back to where the reader came from."""
        self.app.pop_screen()

    def action_turn(self, by: int) -> None:
        """Scroll by the lines that fit on the screen."""
        self.action_scroll(by * max(1, self.size.height - 2))

    def action_scroll(self, by: int) -> None:
        """Move the page; at its ends nothing happens."""
        hidden = len(help_lines(self._about, self._room(), self.look)) - (self.size.height - 1)
        self._first = min(max(0, self._first + by), max(0, hidden))
        self.paint()
