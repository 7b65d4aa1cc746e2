"""The screen of a job: the list of its keys, and the actions of the mouse."""

import time
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from boltmesh.tui.layout.frame import shown_tabs
from boltmesh.tui.layout.page import RankMap, Table
from boltmesh.tui.metrics.heat import chosen_heat
from boltmesh.tui.pages.ranks import RANK
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.panels.chart import newest_metrics
from boltmesh.tui.panels.history import cursor_at
from boltmesh.tui.render.tabs import tab_at
from boltmesh.tui.screens.base import Drawn, Prompt
from boltmesh.tui.screens.navigation import NavigationScreen
from boltmesh.tui.state import metric_names

WHEEL_ROWS = 3
SCRUB_S = 10.0


class JobScreen(NavigationScreen):
    """Shows one page of a session, and lets keys and mouse change the view.

    Keys that open a page are no bindings: each page declares its own, see ``NavigationScreen``.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("0", "app.show_jobs", "jobs"),
        Binding("escape", "back", "back"),
        Binding("enter", "drill", "one rank"),
        Binding("slash", "filter", "filter", priority=True),
        Binding("s", "sort", "sort by the next column"),
        Binding("S", "reverse", "sort the other way round"),
        Binding("space", "toggle_pause", "pause"),
        Binding("m", "next_metric(1)", "next metric"),
        Binding("M", "next_metric(-1)", "previous metric"),
        Binding("L", "toggle_log", "logarithmic axis"),
        Binding("z", "zoom(1)", "newest half of the charts"),
        Binding("Z", "zoom(-1)", "twice as much in the charts"),
        Binding("less_than_sign", "pan(-1)", "earlier steps in the charts"),
        Binding("greater_than_sign", "pan(1)", "later steps in the charts"),
        Binding("x", "toggle_time", "steps or time in the charts"),
        Binding("e", "toggle_smooth", "moving mean in the charts"),
        Binding("w", "write", "write the screen to files"),
        Binding("y", "copy", "copy the screen"),
        Binding("f", "next_heat(1)", "next figure of the ranks"),
        Binding("F", "next_heat(-1)", "previous figure of the ranks"),
        Binding("down,j", "move(0, 1)", "down"),
        Binding("up,k", "move(0, -1)", "up"),
        Binding("right", "move(1, 0)", "right"),
        Binding("left", "move(-1, 0)", "left"),
        Binding("pagedown", "turn(1)", "page down"),
        Binding("pageup", "turn(-1)", "page up"),
        Binding("home", "jump(0)", "first row"),
        Binding("end", "jump(-1)", "last row"),
        Binding("tab", "next_page(1)", "next screen"),
        Binding("shift+tab", "next_page(-1)", "previous screen"),
        Binding("g", "app.go_to_screen", "go to a screen by name"),
        Binding("o", "next_table", "other table"),
        Binding("left_square_bracket", f"scrub(-{SCRUB_S})", "10 s back"),
        Binding("right_square_bracket", f"scrub({SCRUB_S})", "10 s forward"),
        Binding("comma", "step(-1)", "one frame back"),
        Binding("full_stop", "step(1)", "one frame forward"),
        Binding("plus,equals_sign", "change_speed(2.0)", "faster"),
        Binding("minus", "change_speed(0.5)", "slower"),
    ]  # fmt: skip

    def action_back(self) -> None:
        """Undo the newest narrowing of the view: a rank, a filter, a page; then go to the jobs."""
        table = self.table
        if self.page.charts is not None and self.session.view.cursor is not None:
            self.put_cursor(None)
            return
        if self.leave_page():
            return
        if table is not None and self.session.view.table(table.name).filter:
            self._set_filter("")
        elif self.page is not PAGES["overview"]:
            self.show_page("overview")
        else:
            self.dashboard.action_show_jobs()

    def action_toggle_pause(self) -> None:
        """Pause the screen, or show the newest state again."""
        self.session.toggle_pause()
        self.paint()

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

    def action_copy(self) -> None:
        """Put the text of the screen on the clipboard, by the terminal (OSC 52)."""
        self.app.copy_to_clipboard(self.text())
        self.say("the screen's text was sent to the terminal's clipboard")

    def action_write(self) -> None:
        """Write the screen as SVG and as text to the working directory."""
        state = self.session.state
        job = "job" if state is None else state.job.id
        name = f"boltmesh-{job}-{self.page.tab.name}-{time.strftime('%H%M%S')}"
        try:
            for ending, text in (("svg", self.dashboard.svg()), ("txt", self.text())):
                with open(f"{name}.{ending}", "x", encoding="utf-8") as file:
                    file.write(text)
        except OSError as error:
            self.say(f"the screen was not written: {error.strerror or error}")
        else:
            self.say(f"written: {name}.svg and .txt")

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
        """Go to another frame of a recording."""
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
            self.place_cursor()
            self.paint()

    def on_click(self, event: events.Click) -> None:
        """Run the action of the cell under the pointer."""
        drawn = self.drawn_at(event.screen_x, event.screen_y)
        if drawn is None or self.scene is None:
            return
        region = drawn.panel.region
        x, y = event.screen_x - region.x, event.screen_y - region.y
        is_double = event.chain >= 2
        if drawn.panel.name == "tabs":
            self._click_tab(region.width, x)
        elif drawn.panel.name == "metrics":
            self._click_metric(y)
        elif drawn.panel.name == "history" and self.page.charts is not None:
            state, view = self.scene.state, self.scene.view
            self.put_cursor(cursor_at(state, region.width, region.height, view, x, y))
        elif (rank_map := self.page.rank_map) and rank_map.panel == drawn.panel.name:
            self._click_rank(rank_map, drawn, x, y, is_double=is_double)
        else:
            for table in self.page.tables:
                if table.name == drawn.panel.name:
                    self._click_table(table, drawn, x, y, is_double=is_double)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Go down in the table under the pointer."""
        self._scroll(event, WHEEL_ROWS)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Go up in the table under the pointer."""
        self._scroll(event, -WHEEL_ROWS)

    def _click_tab(self, width: int, x: int) -> None:
        tabs = shown_tabs(self.page, width, has_jobs=self.dashboard.has_jobs)
        name = tab_at(tabs, self.page.tab.name, width, x)
        if name == "jobs":
            self.dashboard.action_show_jobs()
        elif name is not None:
            self.show_page(name)

    def _click_metric(self, y: int) -> None:
        """Show a metric of the list in the chart, if it has a curve."""
        scene = self.scene
        if scene is None:
            return
        names = list(newest_metrics(scene.state))
        row = y - scene.title
        if 0 <= row < len(names) and names[row] in metric_names(scene.state):
            self.show_metric(names[row])

    def _click_rank(
        self, rank_map: RankMap, drawn: Drawn, x: int, y: int, *, is_double: bool
    ) -> None:
        scene = self.scene
        if scene is None:
            return
        rank = rank_map.rank_at(
            scene.state,
            drawn.panel.region.width,
            drawn.panel.region.height,
            x,
            y,
            look=scene.look,
            figure=chosen_heat(scene.view),
        )
        if rank is None:
            return
        self.session.choose(rank=rank)
        if is_double:
            self.show_rank(rank)
        self.paint()

    def _click_table(self, table: Table, drawn: Drawn, x: int, y: int, *, is_double: bool) -> None:
        scene = self.scene
        if scene is None:
            return
        view = scene.view.table(table.name)
        if len(self.page.tables) > 1:
            self.activate(table.name)
        column = drawn.title_at(x, y, table.columns)
        if column is not None:
            self.sort_by(
                table, column, is_descending=view.sort == column and not view.is_descending
            )
            return
        row = drawn.row_at(y)
        if row is not None:
            self.select(table, row)
            if is_double:
                self.action_drill()

    def _scroll(self, event: events.MouseEvent, by: int) -> None:
        drawn = self.drawn_at(event.screen_x, event.screen_y)
        if self.page is RANK or drawn is None:
            return
        for table in self.page.tables:
            if table.name == drawn.panel.name:
                self.move_row(table, by)
