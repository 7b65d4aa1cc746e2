"""The screen of a job: all keys in one list, and what only this screen does."""

from typing import ClassVar

from textual.binding import Binding, BindingType
from typing_extensions import override

from boltmesh.tui.pages.page import PAGE_TABS
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.screens.mouse import PointingScreen
from boltmesh.tui.screens.prompt import Prompt

SCRUB_S = 10.0


class JobScreen(PointingScreen):
    """Shows one page of a session, and lets keys and mouse change what is shown."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(tab.key, f"show_page('{tab.name}')", tab.title) for tab in PAGE_TABS),
        Binding("0", "app.show_jobs", "jobs"),
        Binding("escape", "back", "back"),
        Binding("enter", "drill", "one rank"),
        Binding("slash", "filter", "filter", priority=True),
        Binding("s", "sort", "sort by the next column"),
        Binding("S", "reverse", "sort the other way round"),
        Binding("space", "toggle_pause", "hold"),
        Binding("m", "next_metric(1)", "next metric"),
        Binding("M", "next_metric(-1)", "previous metric"),
        Binding("y", "toggle_log", "logarithmic axis"),
        Binding("f", "next_heat(1)", "next figure of the ranks"),
        Binding("F", "next_heat(-1)", "previous figure of the ranks"),
        Binding("down,j", "move(0, 1)", "down"),
        Binding("up,k", "move(0, -1)", "up"),
        Binding("right,l", "move(1, 0)", "right"),
        Binding("left,h", "move(-1, 0)", "left"),
        Binding("pagedown", "turn(1)", "page down"),
        Binding("pageup", "turn(-1)", "page up"),
        Binding("home", "jump(0)", "first row"),
        Binding("end", "jump(-1)", "last row"),
        Binding("tab", "next_table", "other table"),
        Binding("left_square_bracket", f"scrub(-{SCRUB_S})", "10 s back"),
        Binding("right_square_bracket", f"scrub({SCRUB_S})", "10 s on"),
        Binding("comma", "step(-1)", "one look back"),
        Binding("full_stop", "step(1)", "one look on"),
        Binding("plus,equals_sign", "change_speed(2.0)", "faster"),
        Binding("minus", "change_speed(0.5)", "slower"),
    ]  # fmt: skip

    def action_back(self) -> None:
        """Undo what narrowed the view last: a rank, a filter, a page; then go to the jobs."""
        table = self.table
        if self.leave_rank():
            return
        if table is not None and self.session.view.table(table.name).filter:
            self._set_filter("")
        elif self.page is not PAGES["overview"]:
            self.show_page("overview")
        else:
            self.dashboard.action_show_jobs()

    def action_toggle_pause(self) -> None:
        """Hold the screen, or go on with the newest state."""
        self.session.toggle_pause()
        self.paint()

    @override
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # While somebody types, a slash is a character.
        return not (action == "filter" and self.query(Prompt))

    async def action_filter(self) -> None:
        """Open the line in which the rows of the table are chosen."""
        table = self.table
        if table is None:
            self.say("there is no table on this screen to filter")
        elif not self.query(Prompt):
            await Prompt.open(self, self.session.view.table(table.name).filter)
            self.paint()

    def on_prompt_typed(self, message: Prompt.Typed) -> None:
        """Show the rows that are left."""
        self._set_filter(message.words)

    async def on_prompt_done(self) -> None:
        """Close the line."""
        await self.query(Prompt).remove()
        self.paint()

    def action_scrub(self, by_s: float) -> None:
        """Move in the time of a recording."""
        recording = self.session.recording
        if recording is not None:
            self.seek(recording.position + by_s)

    def seek(self, moment: float) -> None:
        """Go to a moment of a recording."""
        recording = self.session.recording
        if recording is not None:
            recording.seek(moment)
            self.start_look()

    def action_step(self, by: int) -> None:
        """Go to another look of a recording."""
        recording = self.session.recording
        if recording is not None:
            recording.step(by)
            self.start_look()

    def action_change_speed(self, factor: float) -> None:
        """Play a recording faster or slower."""
        recording = self.session.recording
        if recording is not None:
            recording.speed *= factor
            self.paint()

    def _set_filter(self, words: str) -> None:
        table = self.table
        if table is not None:
            self.session.look_at_table(table.name, filter=words, selected=None, first=0)
            self.paint()
