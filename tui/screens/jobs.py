"""The choice of a job, where more than one could be meant."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec
from textual import events
from textual.binding import Binding, BindingType
from typing_extensions import override

from boltmesh.errors import BoltMeshError
from boltmesh.tui.layout.page import Panel
from boltmesh.tui.layout.region import Region
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.panels.jobs import COLUMNS, draw_jobs, shown_jobs
from boltmesh.tui.render.line import Line, fit
from boltmesh.tui.render.tabs import draw_keys
from boltmesh.tui.screens import live
from boltmesh.tui.screens.base import PanelScreen, Prompt
from boltmesh.tui.view import TableView

if TYPE_CHECKING:
    from boltmesh.telemetry.reader.reader import JobSummary

HELP: Final = PageHelp(
    about="jobs: yours on the host that is watched, running and ended",
    keys=(("enter", "attach to the job"),),
)
KEYS = (
    ("enter", "open"), ("j k", "choose"), ("/", "filter"), ("s S", "sort"), ("q", "quit"),
    ("?", "help"), ("t", "theme"),
)  # fmt: skip


class JobsScreen(PanelScreen):
    """Lists the jobs again every second; the cursor stays on the job, not on the line."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "down"),
        Binding("up,k", "move(-1)", "up"),
        Binding("pagedown", "move(10)", "page down"),
        Binding("pageup", "move(-10)", "page up"),
        Binding("home", "move(-1000000)", "first job"),
        Binding("end", "move(1000000)", "last job"),
        Binding("enter", "open", "open"),
        Binding("slash", "filter", "filter", priority=True),
        Binding("s", "sort", "sort by the next column"),
        Binding("S", "reverse", "sort the other way round"),
        Binding("escape", "back", "back"),
    ]

    def __init__(
        self,
        list_jobs: Callable[[], Sequence["JobSummary"]],
        *,
        interval_s: float | None = 1.0,
    ) -> None:
        super().__init__()
        self._list_jobs = list_jobs
        self._interval_s = interval_s
        self._jobs: Sequence[JobSummary] = ()
        self._view = TableView()
        self._chosen: str | None = None
        self._trouble = "reading the list of jobs"
        """Why the list is not of now, while nothing else is said."""
        self._is_listing = False
        self._listed = float("-inf")
        self._cost_s = 0.0
        """CPU time of the last list."""

    @property
    def shown(self) -> Sequence["JobSummary"]:
        """The jobs on the screen, in their order."""
        return shown_jobs(self._jobs, self._view)

    @override
    def panels(self) -> Sequence[Panel]:
        width, height = self.size
        margin = 1 if width > 2 else 0
        page = Region(margin, 0, width - 2 * margin, max(0, height - 1))
        if height < 2:
            return [Panel("jobs", page._replace(height=height), self._draw)]
        keys = page._replace(y=height - 1, height=1)
        if self.query(Prompt):
            return [Panel("jobs", page, self._draw)]
        return [Panel("jobs", page, self._draw), Panel("keys", keys, self._draw_bottom)]

    async def on_mount(self) -> None:
        """List the jobs, which the first paint waits for unless they are many or far away."""
        first = asyncio.ensure_future(self.list_again())
        await asyncio.wait({first}, timeout=live.FIRST_LOOK_S)
        if not first.done():
            self.run_worker(asyncio.wait({first}), group="list")
        if self._interval_s is not None:
            self.set_interval(self._interval_s, self._start_listing)

    async def list_again(self) -> None:
        """Read the list in a thread, then draw it; unreadable jobs stay, with the reason."""
        self._is_listing, begun_s = True, time.process_time()
        try:
            self._jobs = await asyncio.to_thread(self._list_jobs)
            self._trouble = ""
        except (BoltMeshError, OSError) as error:
            self._trouble = str(error)
        finally:
            self._is_listing, self._listed = False, self.dashboard.clock()
        self._cost_s = time.process_time() - begun_s
        self.paint()

    def on_click(self, event: events.Click) -> None:
        """Sort by a title, choose a job, or open it with the second click."""
        drawn = self.drawn_at(event.screen_x, event.screen_y)
        if drawn is None or drawn.panel.name != "jobs":
            return
        region = drawn.panel.region
        x, y = event.screen_x - region.x, event.screen_y - region.y
        column = drawn.title_at(x, y, COLUMNS)
        if column is not None:
            self._sort(
                column, is_descending=self._view.sort == column and not self._view.is_descending
            )
            return
        row = drawn.row_at(y)
        if row is not None:
            self._choose(row)
            if event.chain >= 2:
                self.action_open()

    def on_mouse_scroll_down(self) -> None:
        """Choose the next job."""
        self.action_move(1)

    def on_mouse_scroll_up(self) -> None:
        """Choose the job before."""
        self.action_move(-1)

    def action_move(self, by: int) -> None:
        """Move the cursor; at the ends nothing happens."""
        shown = self.shown
        if shown:
            self._choose(min(max(0, self._place() + by), len(shown) - 1))

    def action_open(self) -> None:
        """Attach to the job under the cursor."""
        shown = self.shown
        if shown:
            self.dashboard.open_job(shown[self._place()].id)

    def action_sort(self) -> None:
        """Sort by the next column."""
        places: list[str | None] = [None, *COLUMNS]
        self._sort(places[(places.index(self._view.sort) + 1) % len(places)])

    def action_reverse(self) -> None:
        """Sort the other way round."""
        if self._view.sort is None:
            self.say("press s first to choose a column")
        else:
            self._sort(self._view.sort, is_descending=not self._view.is_descending)

    async def action_filter(self) -> None:
        """Open the line in which the rows are chosen."""
        if not self.query(Prompt):
            await Prompt.open(self, self._view.filter)
            self.paint()

    def action_back(self) -> None:
        """Take the filter away, or go back to the job that was shown."""
        if self._view.filter:
            self._look(filter="")
        else:
            self.dashboard.leave_jobs()

    def on_prompt_typed(self, message: Prompt.Typed) -> None:
        """Show the rows that are left."""
        self._look(filter=message.words)

    def _start_listing(self) -> None:
        waited = self.dashboard.clock() - self._listed
        if not self._is_listing and waited * live.MAX_SHARE >= self._cost_s:
            self.run_worker(self.list_again(), group="list")

    def _place(self) -> int:
        """Return the row of the chosen job; the first if none is chosen or it is gone."""
        ids = [job.id for job in self.shown]
        return ids.index(self._chosen) if self._chosen in ids else 0

    def _choose(self, row: int) -> None:
        drawn = self.canvas.drawn_panel("jobs")
        if drawn is not None and (first := drawn.first_row()) is not None:
            self._view = msgspec.structs.replace(self._view, first=first)
        self._chosen = self.shown[row].id
        self.paint()

    def _sort(self, column: str | None, *, is_descending: bool = False) -> None:
        self._look(sort=column, is_descending=is_descending)

    def _look(self, **changes: object) -> None:
        self._view = msgspec.structs.replace(self._view, **changes)
        self.paint()

    def _draw(self, width: int, height: int) -> list[Line]:
        view = msgspec.structs.replace(self._view, selected=self._place())
        return draw_jobs(self._jobs, width, height, self.look, table=view, trouble=self._trouble)

    def _draw_bottom(self, width: int, height: int) -> list[Line]:
        if note := self.note or self._trouble:
            return [Line(fit(note, width, ellipsis=self.look.glyphs.ellipsis), "warn")]
        line = Line()
        if self._view.filter:
            line.add("/ ", "accent").add(self._view.filter, "strong").add("   ")
        return [line.join(draw_keys(KEYS, width - line.width)).crop(width)][:height]
