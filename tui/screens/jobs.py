"""The choice of a job, where more than one could be meant."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from typing_extensions import override

from boltmesh.tui.drawing.jobs import draw_jobs
from boltmesh.tui.drawing.keys import draw_keys
from boltmesh.tui.drawing.line import Line, fit
from boltmesh.tui.drawing.look import heading
from boltmesh.tui.screens.base import PanelScreen
from boltmesh.tui.widgets.panel import Panel

if TYPE_CHECKING:
    from boltmesh.telemetry.reader import JobSummary

KEYS = (("enter", "open"), ("j k", "choose"), ("q", "quit"), ("?", "help"), ("t", "theme"))


class JobsScreen(PanelScreen):
    """Lists the jobs anew every second; the cursor stays on the job, not on the line."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "down"),
        Binding("up,k", "move(-1)", "up"),
        Binding("enter", "open", "open"),
        Binding("escape", "app.leave_jobs", "back"),
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
        self._jobs = list_jobs()
        self._chosen = self._jobs[0].id if self._jobs else None
        self._note = ""

    @override
    def compose(self) -> ComposeResult:
        yield Panel(self._draw, id="page")
        yield Panel(lambda width, _: [draw_keys(KEYS, width)], id="keys")

    def on_mount(self) -> None:
        """Draw the list, and keep it up to date."""
        self.paint()
        if self._interval_s is not None:
            self.set_interval(self._interval_s, self._start_listing)

    async def list_again(self) -> None:
        """Read the list in a thread, then draw it."""
        self._jobs = await asyncio.to_thread(self._list_jobs)
        if self._place() is None:
            self._chosen = self._jobs[0].id if self._jobs else None
        self.paint()

    def say(self, note: str) -> None:
        """Show a line above the list until the next key."""
        self._note = note
        self.paint()

    def action_move(self, by: int) -> None:
        """Move the cursor; at the ends nothing happens."""
        place = self._place()
        if place is not None:
            place = min(max(0, place + by), len(self._jobs) - 1)
            self._chosen = self._jobs[place].id
            self.say("")

    def action_open(self) -> None:
        """Attach to the job under the cursor."""
        if self._chosen is not None:
            self.dashboard.open_job(self._chosen)

    def _start_listing(self) -> None:
        self.run_worker(self.list_again(), group="list", exclusive=True)

    def _place(self) -> int | None:
        ids = [job.id for job in self._jobs]
        return ids.index(self._chosen) if self._chosen in ids else None

    def _draw(self, width: int, height: int) -> list[Line]:
        glyphs = self.look.glyphs
        header, *rows = draw_jobs(self._jobs, max(0, width - 2), self.look)
        lines = [heading("jobs on this host", width, self.look)]
        if self._note:
            lines.append(Line(fit(self._note, width, ellipsis=glyphs.ellipsis), "warn"))
        lines.append(Line("  ").join(header))
        place = self._place() or 0
        room = max(1, height - len(lines))
        first = max(0, place - room + 1)
        for number, row in enumerate(rows[first : first + room], start=first):
            if number == place:
                chosen = Line(f"{glyphs.cursor} ", "selected").add(row.plain, "selected")
                lines.append(chosen.pad_to(width, role="selected"))
            else:
                lines.append(Line("  ").join(row))
        if not rows:
            lines.append(Line("  none", "muted"))
        return lines[:height]
