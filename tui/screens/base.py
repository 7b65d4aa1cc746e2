"""What the screens share: one canvas, their look, and where a click was."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from textual.app import ComposeResult
from textual.screen import Screen
from typing_extensions import override

from boltmesh.tui.layout.page import Panel
from boltmesh.tui.layout.region import has_headings
from boltmesh.tui.render.style import Style
from boltmesh.tui.theme import Palette
from boltmesh.tui.widgets.canvas import Canvas, Drawn

if TYPE_CHECKING:
    from boltmesh.tui.app import DashboardApp


class PanelScreen(Screen[None]):
    """A screen of panels that stand where a plan puts them."""

    AUTO_FOCUS = None

    @property
    def dashboard(self) -> "DashboardApp":
        """The app, by its own type."""
        return cast("DashboardApp", self.app)

    @property
    def look(self) -> Style:
        """How to draw at the present size."""
        return Style(self.dashboard.glyphs, has_headings=has_headings(self.size.height))

    @property
    def palette(self) -> Palette:
        """The colours in use."""
        return self.dashboard.palette

    @property
    def canvas(self) -> Canvas:
        """What the screen is painted on."""
        return self.query_one(Canvas)

    def panels(self) -> Sequence[Panel]:
        """Return what the screen shows at its present size."""
        raise NotImplementedError

    @override
    def compose(self) -> ComposeResult:
        yield Canvas()

    def on_resize(self) -> None:
        """Give every panel its new place."""
        self.paint()

    def on_screen_resume(self) -> None:
        """Draw for the first time, or catch up with what happened behind another screen."""
        self.paint()

    def paint(self) -> None:
        """Draw every panel anew, unless nobody can see it."""
        if self.is_current and self.is_mounted:
            self.canvas.show(
                self.panels(), self.palette.styles, is_ascii=self.dashboard.glyphs.is_ascii
            )

    def text(self) -> str:
        """Return what is on the screen as plain text."""
        lines = (self.canvas.render_line(y).text.rstrip() for y in range(self.size.height))
        return "\n".join(lines) + "\n"

    def drawn_at(self, x: int, y: int) -> Drawn | None:
        """Return the panel that a cell belongs to."""
        for drawn in self.canvas.drawn:
            if drawn.panel.region.has(x, y):
                return drawn
        return None
