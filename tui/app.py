"""The dashboard as a Textual app: screens, themes and the keys that work everywhere."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from boltmesh.errors import TelemetryError
from boltmesh.tui.drawing.glyphs import ASCII, UNICODE, Glyphs
from boltmesh.tui.screens.base import PanelScreen
from boltmesh.tui.screens.help import HelpScreen
from boltmesh.tui.screens.jobs import JobsScreen
from boltmesh.tui.screens.overview import OverviewScreen
from boltmesh.tui.source import Source
from boltmesh.tui.theme import PALETTES, Palette, choose_palette

if TYPE_CHECKING:
    from boltmesh.telemetry.reader import JobSummary


class DashboardApp(App[None]):
    """Shows one job, or lets the user choose one.

    Args:
        source: The job to begin with. None: begin with the list of jobs.
        list_jobs: Returns the jobs to choose from. None: there is no list, as for the demo.
        open_source: Attaches to a job of that list by its id.
        is_ascii: Draw with ASCII characters only.
        palette: A name from :data:`~boltmesh.tui.theme.PALETTES`. None: what the terminal can show.
        interval_s: Time between two looks. None: only when a test asks for one.
    """

    TITLE = "boltmesh"
    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = False
    INLINE_PADDING = 0
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "detach", "detach"),
        Binding("question_mark", "show_help", "help"),
        Binding("t", "next_theme", "theme"),
    ]

    def __init__(
        self,
        source: Source | None,
        *,
        list_jobs: Callable[[], Sequence["JobSummary"]] | None = None,
        open_source: Callable[[str], Source] | None = None,
        is_ascii: bool = False,
        palette: str | None = None,
        interval_s: float | None = 1.0,
    ) -> None:
        # Textual decides here, before a theme can be set, whether NO_COLOR means greys or nothing.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.glyphs: Glyphs = ASCII if is_ascii else UNICODE
        self.animation_level = "none"
        self._source = source
        self._list_jobs = list_jobs
        self._open_source = open_source
        self._interval_s = interval_s
        self._overview: OverviewScreen | None = None
        for item in PALETTES.values():
            self.register_theme(item.theme)
        self.theme = choose_palette(
            palette, color_system=self.console.color_system, no_color=self.no_color
        ).name

    @property
    def palette(self) -> Palette:
        """The colours in use."""
        return PALETTES.get(self.theme) or PALETTES["terminal"]

    @property
    def has_jobs(self) -> bool:
        """Whether there is a list of jobs to go to."""
        return self._list_jobs is not None

    @property
    def detached_from(self) -> str | None:
        """The id of the job that was on the screen, if it was running when it was last seen."""
        if self._overview is None or self._overview.state.job.state != "running":
            return None
        return self._overview.state.job.id

    def on_mount(self) -> None:
        """Begin with the job, or with the choice of one."""
        if self._source is not None:
            self._show(self._source)
        else:
            self.action_show_jobs()

    def open_job(self, job_id: str) -> None:
        """Attach to another job, and detach from the one before."""
        if self._open_source is None:
            return
        try:
            source = self._open_source(job_id)
        except TelemetryError as error:
            # The list is a second old; the job's files may be gone by now.
            if isinstance(self.screen, JobsScreen):
                self.screen.say(str(error))
            return
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self._show(source)

    def action_detach(self) -> None:
        """Leave; the job does not notice."""
        self.exit()

    def action_show_help(self) -> None:
        """Open the help page, once."""
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def action_show_jobs(self) -> None:
        """Open the list of jobs, where there is one."""
        if self._list_jobs is not None:
            self.push_screen(JobsScreen(self._list_jobs, interval_s=self._interval_s))

    def action_leave_jobs(self) -> None:
        """Go back to the job that was shown; without one there is nothing to go back to."""
        if self._overview is not None:
            self.pop_screen()

    def action_next_theme(self) -> None:
        """Use the next palette; a terminal that wants no colour keeps none."""
        if self.no_color:
            return
        names = list(PALETTES)
        self.theme = names[(names.index(self.palette.name) + 1) % len(names)]
        # Styles of the new theme reach the widgets with the next refresh.
        self.call_after_refresh(self._repaint)

    def _repaint(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, PanelScreen):
                screen.paint()

    def _show(self, source: Source) -> None:
        self._overview = OverviewScreen(source, interval_s=self._interval_s)
        self.push_screen(self._overview)
