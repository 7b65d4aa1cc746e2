"""The help page."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from typing_extensions import override

from boltmesh.tui.drawing.help import draw_help, help_lines
from boltmesh.tui.drawing.keys import draw_keys
from boltmesh.tui.screens.base import PanelScreen
from boltmesh.tui.widgets.panel import Panel


class HelpScreen(PanelScreen):
    """Keys and figures explained; scrolls where the terminal is short."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,enter,space", "dismiss_page", "back"),
        Binding("down,j", "scroll(1)", "down"),
        Binding("up,k", "scroll(-1)", "up"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._first = 0

    @override
    def compose(self) -> ComposeResult:
        yield Panel(
            lambda width, height: draw_help(width, height, self.look, first=self._first),
            id="page",
        )
        yield Panel(
            lambda width, _: [draw_keys((("esc", "back"), ("j k", "scroll")), width)], id="keys"
        )

    def on_mount(self) -> None:
        """Draw the page."""
        self.paint()

    def action_dismiss_page(self) -> None:
        """Go back to where the reader came from."""
        self.app.pop_screen()

    def action_scroll(self, by: int) -> None:
        """Move the page; at its ends nothing happens."""
        panel = self.query_one("#page", Panel)
        hidden = len(help_lines(panel.size.width, self.look)) - panel.size.height
        self._first = min(max(0, self._first + by), max(0, hidden))
        self.paint()
