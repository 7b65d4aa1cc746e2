"""The line in which a filter is typed; it exists only while somebody types."""

from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input, Label
from typing_extensions import override


class Prompt(Horizontal):
    """Says at every key what the filter is now; enter keeps it, esc takes it away."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "clear", "all rows")]

    @dataclass
    class Typed(Message):
        """The filter is another one."""

        words: str

    @dataclass
    class Done(Message):
        """Nobody types any longer."""

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
