"""Common parts of the screens: a canvas, their look, where a click was, the line for a filter.

The canvas is the one widget that paints every screen: panels at their places, line by line.
Textual's own widgets lay out and re-style every cell that changes; here a refresh is one call of a
pure function a panel and one strip a line, which at 1 Hz is what keeps a viewer light. The drawings
never contain markup, so nothing that a job wrote is ever parsed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

from rich.segment import Segment
from rich.style import Style as Colour
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.geometry import Region as Area
from textual.message import Message
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, Label
from typing_extensions import override

from boltmesh.tui.layout.page import Panel
from boltmesh.tui.layout.region import has_headings
from boltmesh.tui.render.line import TITLES, Line, Role, Span, to_ascii
from boltmesh.tui.render.style import Style
from boltmesh.tui.render.table import column_at
from boltmesh.tui.theme import Palette

if TYPE_CHECKING:
    from boltmesh.tui.app import DashboardApp


class _Piece(NamedTuple):
    """One line of one panel, as it is sent."""

    x: int
    strip: Strip


class Drawn(NamedTuple):
    """A panel and the lines that it shows."""

    panel: Panel
    lines: list[Line]

    def row_at(self, y: int) -> int | None:
        """Return the row of a table on a line; None: there is none."""
        row = self.lines[y].row if y < len(self.lines) else None
        return None if row == TITLES else row

    def title_at(self, x: int, y: int, titles: Sequence[str]) -> str | None:
        """Return the title at a cell, or nearest to it, where that is in the line of titles."""
        is_header = y < len(self.lines) and self.lines[y].row == TITLES
        return column_at(self.lines[y], x, titles) if is_header else None

    def first_row(self) -> int | None:
        """Return the first row of a table that is shown, if one is."""
        rows = map(self.row_at, range(len(self.lines)))
        return next((row for row in rows if row is not None), None)


class Canvas(Widget):
    """Shows panels, and sends the terminal only the lines of them that have changed."""

    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Drawn] = []
        """Lines on the screen, to find the place of a click."""
        self._rows: list[list[_Piece]] = []
        self._painter: _Painter | None = None

    def drawn_panel(self, name: str) -> Drawn | None:
        """Return the panel of that name, if it is on the screen."""
        return next((drawn for drawn in self.drawn if drawn.panel.name == name), None)

    def show(
        self, panels: Sequence[Panel], styles: Mapping[Role, Colour], *, is_ascii: bool
    ) -> None:
        """Draw the panels in these styles."""
        before = self._rows
        width, height = self.screen.size
        painter = self._painter
        if painter is None or painter.colours != (self.rich_style, styles, is_ascii):
            painter = self._painter = _Painter(self.rich_style, styles, is_ascii=is_ascii)
        rows: list[list[_Piece]] = [[] for _ in range(height)]
        self.drawn = []
        for panel in panels:
            region = panel.region
            lines = draw_lines(panel)
            self.drawn.append(Drawn(panel, lines))
            for y, line in enumerate(lines, start=region.y):
                if y < height:
                    strip = painter.paint(line, min(region.width, width - region.x))
                    rows[y].append(_Piece(region.x, strip))
        for row in rows:
            row.sort(key=lambda piece: piece.x)
        self._rows = rows
        if len(before) != height:
            self.refresh()
            return
        for y, (old, new) in enumerate(zip(before, rows, strict=True)):
            self._refresh_line(y, old, new, width)

    @override
    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.rich_style
        pieces = self._rows[y] if y < len(self._rows) else []
        segments: list[Segment] = []
        x = 0
        for piece in pieces:
            if piece.x > x:
                segments.append(Segment(" " * (piece.x - x), base))
            segments += piece.strip
            x = piece.x + piece.strip.cell_length
        return Strip(segments).adjust_cell_length(width, base)

    def _refresh_line(self, y: int, old: list[_Piece], new: list[_Piece], width: int) -> None:
        if [(piece.x, piece.strip.cell_length) for piece in old] != [
            (piece.x, piece.strip.cell_length) for piece in new
        ]:
            self.refresh(Area(0, y, width, 1))
            return
        for before, piece in zip(old, new, strict=True):
            if before != piece:
                self.refresh(Area(piece.x, y, piece.strip.cell_length, 1))


_KEPT_STRIPS = 256
"""A full screen of lines. Most of them are the same at the next look."""


class _Painter:
    """Turns lines into strips in the colours of one theme."""

    def __init__(self, base: Colour, styles: Mapping[Role, Colour], *, is_ascii: bool) -> None:
        self.colours = (base, styles, is_ascii)
        self._base = base
        self._styles = {role: base + style for role, style in styles.items()}
        self._is_ascii = is_ascii
        self._strip = lru_cache(_KEPT_STRIPS)(self._new_strip)

    def paint(self, line: Line, width: int) -> Strip:
        """Return the line in ``width`` cells; the same text has the same strip."""
        return self._strip(tuple(line.crop(width).spans), max(0, width))

    def _new_strip(self, spans: tuple[Span, ...], width: int) -> Strip:
        segments = [
            Segment(to_ascii(text) if self._is_ascii else text, self._styles.get(role, self._base))
            for text, role in spans
        ]
        return Strip(segments).adjust_cell_length(width, self._base)


def draw_lines(panel: Panel) -> list[Line]:
    """Return a panel's lines; where its drawing fails, say so there, and keep the rest.

    What is drawn may come from a recording or from another host, and be impossible.
    """
    region = panel.region
    try:
        return panel.draw(region.width, region.height)[: region.height]
    except Exception as error:  # noqa: BLE001 - one drawing does not take the screen with it
        return [Line(f"{panel.name} cannot be drawn: {type(error).__name__}: {error}", "bad")]


class PanelScreen(Screen[None]):
    """A screen of panels that stand where a plan puts them."""

    AUTO_FOCUS = None

    def __init__(self) -> None:
        super().__init__()
        self.note = ""
        """Said in place of the keys until the next one is pressed."""

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
        """The canvas that the screen is painted on."""
        return self.query_one(Canvas)

    def panels(self) -> Sequence[Panel]:
        """Return the panels of the screen at its present size."""
        raise NotImplementedError

    @override
    def compose(self) -> ComposeResult:
        yield Canvas()

    def on_resize(self) -> None:
        """Give every panel its new place."""
        self.paint()

    def on_screen_resume(self) -> None:
        """Draw for the first time, or catch up after another screen was on top."""
        self.paint()

    def on_key(self, event: events.Key) -> None:
        """Remove the message, at any key."""
        del event
        self.say("")

    def say(self, note: str) -> None:
        """Show a line in place of the keys."""
        if note != self.note:
            self.note = note
            self.paint()

    @override
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # While a filter is typed, a slash is a character and tab does nothing.
        return not (action in {"filter", "next_page"} and self.query(Prompt))

    async def on_prompt_done(self) -> None:
        """Close the line of the filter."""
        await self.query(Prompt).remove()
        self.paint()

    def paint(self) -> None:
        """Draw every panel again, unless the screen is hidden."""
        if self.is_current and self.is_mounted:
            self.canvas.show(
                self.panels(), self.palette.styles, is_ascii=self.dashboard.glyphs.is_ascii
            )

    def text(self) -> str:
        """Return the screen as plain text."""
        lines = (self.canvas.render_line(y).text.rstrip() for y in range(self.size.height))
        return "\n".join(lines) + "\n"

    def drawn_at(self, x: int, y: int) -> Drawn | None:
        """Return the panel that a cell belongs to."""
        for drawn in self.canvas.drawn:
            if drawn.panel.region.has(x, y):
                return drawn
        return None


class Prompt(Horizontal):
    """Applies the filter at every key; enter keeps it, esc removes it."""

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
        # Typed text is no markup, and must not be guessed at. It continues with a new word.
        words = f"{self._words} " if self._words else ""
        yield Input(words, compact=True, select_on_focus=False)

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
        """Pass on the typed text."""
        event.stop()
        self.post_message(self.Typed(event.value.strip()))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        event.stop()
        self.post_message(self.Done())

    def action_clear(self) -> None:
        """Take the filter away."""
        self.post_message(self.Typed(""))
        self.post_message(self.Done())
