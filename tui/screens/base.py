"""What the screens share: their look, and how they paint."""

from typing import TYPE_CHECKING, cast

from textual.screen import Screen

from boltmesh.tui.drawing.look import Look
from boltmesh.tui.layout import has_headings
from boltmesh.tui.theme import Palette
from boltmesh.tui.widgets.panel import Panel

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
    def look(self) -> Look:
        """How to draw at the present size."""
        return Look(self.dashboard.glyphs, has_headings=has_headings(self.size.height))

    @property
    def palette(self) -> Palette:
        """The colours in use."""
        return self.dashboard.palette

    def paint(self) -> None:
        """Draw every panel anew; the app calls it when the theme changes."""
        for panel in self.query(Panel):
            panel.repaint(self.palette.styles, is_ascii=self.look.glyphs.is_ascii)
