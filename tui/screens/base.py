"""Common parts of the screens: a canvas, their look, where a click was, the line for a filter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input, Label
from typing_extensions import override

from boltmesh.tui.layout.page import Panel
from boltmesh.tui.layout.region import has_headings
from boltmesh.tui.render.style import Style
from boltmesh.tui.screens.canvas import Canvas, Drawn
from boltmesh.tui.theme import Palette

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
        """Draw every panel again, unless the screen is hidden."""
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


class Prompt(Horizontal):
    """Says at every key what the filter is now; enter keeps it, esc takes it away."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "clear", "all rows")]

    @dataclass
    class Typed(Message):
        """The filter is another one."""

        words: str

    @dataclass
    class Done(Message):
        """The filter is complete."""

    def __init__(self, words: str) -> None:
        super().__init__(id="prompt")
        self._words = words

    @override
    def compose(self) -> ComposeResult:
        yield Label("/ ")
        # Text of the keyboard is no markup, and must not be guessed at.
        yield Input(self._words, compact=True, select_on_focus=False)

    @staticmethod
    async def open(screen: Screen[None], words: str) -> None:
        """Put the line on a screen; once this returns, the keys come here.

        The binding that leads here has priority, for the app waits for such before it looks at the
        next key: what is typed fast is not taken for commands.
        """
        prompt = Prompt(words)
        await screen.mount(prompt)
        screen.set_focus(prompt.query_one(Input))

    def on_input_changed(self, event: Input.Changed) -> None:
        """Pass on what was typed."""
        event.stop()
        self.post_message(self.Typed(event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        event.stop()
        self.post_message(self.Done())

    def action_clear(self) -> None:
        """Take the filter away."""
        self.post_message(self.Typed(""))
        self.post_message(self.Done())
