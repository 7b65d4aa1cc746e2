"""Definition of a page: its tab, its panels in their regions, its tables, its help."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from boltmesh.tui.layout.region import Plan, Region, split_spare
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.panels.history import draw_trends, has_trends
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style
from boltmesh.tui.render.tabs import Tab
from boltmesh.tui.state import State
from boltmesh.tui.view import TableView, View


class Table(msgspec.Struct, frozen=True):
    """One table of a page; a panel of the same name shows it."""

    name: str
    columns: tuple[str, ...]
    """Titles that it can be sorted by."""
    draw: Callable[..., list[Line]]
    rows: Callable[[State, TableView], Sequence[Any]]
    """Filtered and sorted, as ``TableView.selected`` counts them."""
    rank_of: Callable[[Any], int | None] = lambda _: None
    """The rank that a row is about."""
    has_cursor: bool = False
    """Whether a row is selected from the start. False: its words are about all rows until then."""

    def selected_rank(self, state: State, view: TableView) -> int | None:
        """Return the rank of the selected row."""
        rows = self.rows(state, view)
        if view.selected is None or not rows:
            return None
        return self.rank_of(rows[min(view.selected, len(rows) - 1)])


def next_column(table: Table, view: TableView) -> str | None:
    """Return the column after the one that sorts; None: the table's own order."""
    places: list[str | None] = [None, *table.columns]
    place = places.index(view.sort) if view.sort in places else 0
    return places[(place + 1) % len(places)]


Draw = Callable[[int, int], list[Line]]
"""Width and height in cells to lines, top first; missing lines are blank."""


class Panel(NamedTuple):
    """A drawing at its place."""

    name: str
    region: Region
    draw: Draw


class Scene(msgspec.Struct, frozen=True):
    """All that a page is a function of."""

    state: State
    view: View
    look: Style
    width: int
    """Columns of the whole terminal, which decide how many panels are side by side."""

    @property
    def title(self) -> int:
        """Lines of a panel's heading."""
        return int(self.look.has_headings)


Keys = Sequence[tuple[str, str]]
"""Each key with its word, the most useful first."""


class RankMap(NamedTuple):
    """A panel that shows the ranks side by side: arrows and clicks choose a rank there."""

    panel: str
    """Its name."""
    rank_at: Callable[..., int | None]
    """``(state, width, height, x, y, *, look, figure)``: the rank at a cell of the panel."""
    rank_beside: Callable[..., int | None]
    """``(state, width, height, rank, across, down, *, look, figure)``: the rank that many cells
    away; ``rank`` is None before the first choice."""


WindowOf = Callable[[State, View], tuple[float, float]]
"""The first and the last step, or second, that charts show."""


class Page(ABC):
    """One screen of a job. It has no state: all that it shows is an argument of its methods.

    A new screen is one module in ``boltmesh.tui.pages`` with a subclass and ``PAGE``, an instance.
    The registry finds it there; tabs, keys, help and the command palette read what it declares.
    """

    tab: Tab
    """Its place in the line of tabs, and its key."""
    help: PageHelp
    tables: tuple[Table, ...] = ()
    """The tables that it may show; keys work on the first until another one is chosen."""
    keys: Keys = ()
    """Keys that work here and not on every screen."""
    rank_map: RankMap | None = None
    """Where arrows choose a rank. None: they choose rows, and left and right change the screen."""

    charts: WindowOf | None = None
    """Charts in a panel ``history``: left and right move their cursor, ``<`` and ``>`` pan."""

    @abstractmethod
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """Return the panels, all of them within ``body``."""

    def empty_reason(self, state: State) -> Sequence[str]:
        """Return why this job has nothing to show here, a sentence each; empty if it has."""
        del state
        return ()


def active_table(page: Page, view: View) -> Table | None:
    """Return the table that the keys work on."""
    chosen = view.active.get(page.tab.name)
    for table in page.tables:
        if table.name == chosen:
            return table
    return page.tables[0] if page.tables else None


def table_draw(table: Table, scene: Scene) -> Draw:
    """Return the drawing of a table, looked at as the person has chosen."""
    view = scene.view.table(table.name)
    return partial(table.draw, scene.state, look=scene.look, table=view)


def with_trends(
    scene: Scene, body: Region, needed: int, names: Sequence[str]
) -> tuple[Region, list[Panel]]:
    """Return the part of ``body`` that other panels need, and history for the rest below.

    Args:
        scene: State and options of the drawing.
        body: All of the room.
        needed: Lines of the other panels.
        names: Names of the trends.
    """
    if not has_trends(scene.state, names):
        return body, []
    upper, lower = split_spare(body, needed)
    draw = partial(draw_trends, scene.state, look=scene.look, view=scene.view, names=names)
    return upper, [Panel("trends", lower, draw)] if lower.height else []


def table_with_trends(
    scene: Scene, body: Region, table: Table, names: Sequence[str]
) -> list[Panel]:
    """Return a page of one table, and below it trends if they find room."""
    draw = table_draw(table, scene)
    upper, trends = with_trends(scene, body, len(draw(body.width, body.height)), names)
    return [Panel(table.name, upper, draw), *trends]


def place(plan: Plan, draws: dict[str, Draw]) -> list[Panel]:
    """Return the panels of a plan."""
    return [Panel(name, region, draws[name]) for name, region in plan.items() if region.height]


JOBS: Final = Tab(key="0", name="jobs", title="Jobs")
"""The list of jobs: a tab without a page."""
