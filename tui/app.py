"""The dashboard as a Textual app: screens, themes, settings and the keys that work everywhere."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.command import CommandPalette, Provider
from typing_extensions import override

from boltmesh.errors import BoltMeshError
from boltmesh.tui import settings
from boltmesh.tui.alerts.hook import AlertHook
from boltmesh.tui.alerts.watch import AlertWatch
from boltmesh.tui.render.style import ASCII, UNICODE, Glyphs
from boltmesh.tui.screens.base import PanelScreen
from boltmesh.tui.screens.help import HelpScreen
from boltmesh.tui.screens.job import JobScreen
from boltmesh.tui.screens.jobs import HELP as JOBS_HELP
from boltmesh.tui.screens.jobs import JobsScreen
from boltmesh.tui.screens.palette import Commands, ScreenNames
from boltmesh.tui.session import Session
from boltmesh.tui.sources.live import Source
from boltmesh.tui.theme import PALETTES, Palette, choose_palette

if TYPE_CHECKING:
    from boltmesh.telemetry.reader.reader import JobSummary


class DashboardApp(App[None]):
    """Shows one job, or lets the user choose one.

    Args:
        source: The job to begin with. None: begin with the list of jobs.
        list_jobs: Returns the jobs to choose from. None: there is no list, as for the demo.
        open_source: Attaches to a job of that list by its id.
        is_ascii: Draw with ASCII characters only.
        palette: A name from :data:`~boltmesh.tui.theme.PALETTES`. None: what is remembered, else
            what the terminal can show.
        interval_s: Time between two looks. None: no timer; a test requests each look.
        settings_path: Where choices are remembered. None: nothing is read or written.
        on_alert: Command for ``/bin/sh``, run for each alert.
        other: A run that ``source`` is compared with.
        first_page: The name of the page to begin with. None: the one of last time.
    """

    TITLE = "boltmesh"
    CSS_PATH = "app.tcss"
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {Commands}
    INLINE_PADDING = 0
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "detach", "detach"),
        Binding("question_mark", "show_help", "help"),
        Binding("colon,ctrl+p", "command_palette", "commands"),
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
        settings_path: Path | None = None,
        on_alert: str | None = None,
        other: Source | None = None,
        first_page: str | None = None,
    ) -> None:
        # Textual decides here, before a theme can be set, whether NO_COLOR means greys or nothing.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.glyphs: Glyphs = ASCII if is_ascii else UNICODE
        self.set_class(is_ascii, "ascii")
        self.animation_level = "none"
        self.clock = time.monotonic
        self.is_focused = True
        """Whether this terminal has the keyboard; True where the terminal does not report it."""
        self._source = source
        self._other = other
        self._first_page = first_page
        self._list_jobs = list_jobs
        self._open_source = open_source
        self._interval_s = interval_s
        self._hook = None if on_alert is None else AlertHook(on_alert)
        self._settings_path = settings_path
        self._remembered, self._note = settings.Settings(), None
        if settings_path is not None:
            self._remembered, self._note = settings.load(settings_path)
        self._job_screen: JobScreen | None = None
        self._has_chosen_theme = False
        for item in PALETTES.values():
            self.register_theme(item.theme)
        remembered = self._remembered.theme if self._remembered.theme in PALETTES else None
        self.theme = choose_palette(
            palette or remembered, color_system=self.console.color_system, no_color=self.no_color
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
        state = None if self._job_screen is None else self._job_screen.session.state
        return None if state is None or state.job.state != "running" else state.job.id

    def on_mount(self) -> None:
        """Begin with the job, or with the choice of one."""
        if self._source is not None:
            self._show(self._source)
        else:
            self.action_show_jobs()

    def on_unmount(self) -> None:
        """Let the commands for alerts end, and store the choices."""
        if self._hook is not None:
            self._hook.close()
        if self._settings_path is None or self._job_screen is None:
            return
        screen = self._job_screen
        chosen = settings.settings_of(
            screen.session.view,
            theme=self.theme if self._has_chosen_theme else self._remembered.theme,
            screen=screen.page.tab.name,
        )
        if chosen != self._remembered:
            self.settings_note = settings.save(self._settings_path, chosen)

    settings_note: str | None = None
    """Why the choices could not be stored; read by the command that started the app."""

    def on_app_blur(self) -> None:
        """Look less often while the terminal does not have the keyboard."""
        self.is_focused = False

    def on_app_focus(self) -> None:
        """Look at once."""
        self.is_focused = True
        if self._job_screen is not None and self._interval_s is not None:
            self._job_screen.start_look()

    def open_job(self, job_id: str) -> None:
        """Attach to another job, and detach from the one before."""
        if self._open_source is None:
            return
        try:
            source = self._open_source(job_id)
        except BoltMeshError as error:
            # The list is a second old; the job's files may be gone by now.
            if isinstance(self.screen, JobsScreen):
                self.screen.say(str(error))
            return
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self._show(source)

    def use_theme(self, name: str) -> None:
        """Use another palette; a terminal that wants no colour keeps none."""
        if self.no_color:
            return
        self.theme = name
        self._has_chosen_theme = True
        # Styles of the new theme reach the widgets with the next refresh.
        self.call_after_refresh(self._repaint)

    def leave_jobs(self) -> None:
        """Go back to the job that was shown; without one there is nothing to go back to."""
        if self._job_screen is not None:
            self.pop_screen()

    def svg(self, title: str | None = None) -> str:
        """Return the screen as SVG in which viewers keep the blanks that align columns."""
        svg = self.export_screenshot(title=title)
        return svg.replace("<svg ", '<svg xml:space="preserve" ', 1)

    def action_detach(self) -> None:
        """Leave; the job does not notice."""
        self.exit()

    def action_show_help(self) -> None:
        """Open the help page, once, about the screen in front."""
        if isinstance(self.screen, JobScreen):
            self.push_screen(HelpScreen(self.screen.page.help))
        elif isinstance(self.screen, JobsScreen):
            self.push_screen(HelpScreen(JOBS_HELP))

    def action_show_jobs(self) -> None:
        """Open the list of jobs, once, where there is one."""
        if self._list_jobs is not None and not isinstance(self.screen, JobsScreen):
            self.push_screen(JobsScreen(self._list_jobs, interval_s=self._interval_s))

    @override
    def action_command_palette(self) -> None:
        """Open the palette, once."""
        if not isinstance(self.screen, CommandPalette):
            placeholder = "What do you want to do?"
            self.push_screen(CommandPalette(placeholder=placeholder, id="--command-palette"))

    def action_go_to_screen(self) -> None:
        """Open the list of screens, to choose one by some letters of its name."""
        if isinstance(self.screen, JobScreen):
            self.push_screen(
                CommandPalette(
                    providers=[ScreenNames], placeholder="Which screen?", id="--command-palette"
                )
            )

    def action_next_theme(self) -> None:
        """Use the next palette."""
        names = list(PALETTES)
        self.use_theme(names[(names.index(self.palette.name) + 1) % len(names)])

    def _repaint(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, PanelScreen):
                screen.paint()

    def _show(self, source: Source) -> None:
        before = self._job_screen
        view = settings.view_of(self._remembered) if before is None else before.session.view
        page = self._remembered.screen if before is None else before.page.tab.name
        other, self._other = self._other, None
        page, self._first_page = self._first_page or page, None
        session = Session(source, view=view, watch=AlertWatch(), hook=self._hook, other=other)
        self._job_screen = JobScreen(session, page=page, interval_s=self._interval_s)
        if self._note is not None:
            self._job_screen.note, self._note = self._note, None
        self.push_screen(self._job_screen)
