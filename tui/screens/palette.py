"""The command palette: Textual's own, with the dashboard's commands in the dashboard's order."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.screen import Screen
from typing_extensions import override

from boltmesh.tui.metrics.heat import HEAT_FIGURES
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.sanitize import clean
from boltmesh.tui.screens.help import HelpScreen
from boltmesh.tui.screens.job import JobScreen
from boltmesh.tui.screens.jobs import JobsScreen
from boltmesh.tui.state import metric_names
from boltmesh.tui.theme import PALETTES

if TYPE_CHECKING:
    from boltmesh.tui.app import DashboardApp


MAX_METRICS = 200
"""A job may log thousands of metrics; the palette lists the first of them."""


class Command(NamedTuple):
    """One line of the palette."""

    title: str
    help: str
    run: Callable[[], Any]


def commands_of(app: "DashboardApp", screen: Screen[Any]) -> Iterator[Command]:
    """Yield the commands of a screen, the most wanted first."""
    if isinstance(screen, JobScreen):
        yield from _of_job(screen)
    if app.has_jobs and not isinstance(screen, JobsScreen):
        yield Command("Jobs", "Go to the list of jobs", app.action_show_jobs)
    if not isinstance(screen, HelpScreen):
        yield Command("Help", "Explain this screen and all keys", app.action_show_help)
    if not app.no_color:
        for name in PALETTES:
            yield Command(f"Theme: {name}", "Use these colours", partial(app.use_theme, name))
    yield Command("Detach", "Leave; the job goes on", app.action_detach)


def screen_commands(screen: JobScreen) -> Iterator[Command]:
    """Yield a command for each page of a job."""
    for page in PAGES.values():
        tab = page.tab
        key = f"key {tab.key}, {page.help.about}" if tab.key else page.help.about
        yield Command(tab.title, key, partial(screen.show_page, tab.name))


def _of_job(screen: JobScreen) -> Iterator[Command]:
    session = screen.session
    for command in screen_commands(screen):
        yield command._replace(title=f"Screen: {command.title}")
    recording = session.recording
    if recording is None:
        word = "Resume" if session.view.is_paused else "Pause"
        yield Command(word, "Keep the screen as it is, and back", screen.action_toggle_pause)
    else:
        word = "Pause" if recording.is_playing else "Play"
        yield Command(word, "The replay", screen.action_toggle_pause)
        first, last = recording.span()
        yield Command("Go to the beginning", "In the replay", partial(screen.seek, first))
        yield Command("Go to the end", "In the replay", partial(screen.seek, last))
    table = screen.table
    if table is not None:
        yield Command("Filter", "Choose the rows of this table", screen.action_filter)
        for column in table.columns:
            run = partial(screen.sort_by, table, column)
            yield Command(f"Sort by {column}", "The smallest first", run)
            run = partial(screen.sort_by, table, column, is_descending=True)
            yield Command(f"Sort by {column}, descending", "The largest first", run)
        yield Command("Sort: none", "The table's own order", partial(screen.sort_by, table, None))
    state = session.state
    for name in metric_names(state)[:MAX_METRICS] if state is not None else ():
        run = partial(screen.show_metric, name)
        yield Command(f"Metric: {_plain(name)}", "Show it in the chart", run)
    yield Command("Log axis", "The chart's axis, and back", screen.action_toggle_log)
    for figure in HEAT_FIGURES:
        run = partial(screen.show_heat, figure)
        yield Command(f"Heat map: {figure}", "Figure of the ranks on the overview", run)


def _plain(name: str) -> str:
    """A metric's name is the job's, so neither terminal nor markup may obey it."""
    return clean(name).replace("[", "(").replace("]", ")")


class Commands(Provider):
    """Offers the commands of the screen below the palette."""

    @override
    async def discover(self) -> Hits:
        for command in self._commands():
            yield DiscoveryHit(command.title, command.run, help=command.help)

    @override
    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in self._commands():
            score = matcher.match(command.title)
            if score > 0:
                title = matcher.highlight(command.title)
                yield Hit(score, title, command.run, help=command.help)

    def _commands(self) -> list[Command]:
        return list(commands_of(cast("DashboardApp", self.app), self.screen))


class ScreenNames(Commands):
    """Offers the screens of the job below the palette, by their names alone."""

    @override
    def _commands(self) -> list[Command]:
        return list(screen_commands(cast("JobScreen", self.screen)))
