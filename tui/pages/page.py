"""A page: the panels of one screen of a job, and what its keys work on.

What a page is made of.

The tabs of the pages, in the order of their digits, known before any page is loaded.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from boltmesh.tui.layout.region import Plan, Region
from boltmesh.tui.pages.table import Table
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style
from boltmesh.tui.render.tabs import Tab
from boltmesh.tui.state import State
from boltmesh.tui.view import View

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
    """Of the whole terminal, which decides on the number of columns."""

    @property
    def title(self) -> int:
        """Lines of a panel's heading."""
        return int(self.look.has_headings)


Keys = Sequence[tuple[str, str]]
"""Each key with its word, the most useful first."""


class Page(Protocol):
    """One screen of a job; it keeps nothing, all it knows comes with each call."""

    @property
    def tab(self) -> Tab:
        """Its place in the line of tabs."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that it may show; keys work on the first until another one is clicked."""

    @property
    def keys(self) -> Keys:
        """Keys that work here and not everywhere."""

    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """Return the panels, all of them within ``body``."""


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
    return lambda width, height: table.draw(scene.state, width, height, scene.look, table=view)


def place(plan: Plan, draws: dict[str, Draw]) -> list[Panel]:
    """Return the panels of a plan."""
    return [Panel(name, region, draws[name]) for name, region in plan.items() if region.height]


OVERVIEW: Final = Tab(key="1", name="overview", title="Overview", short="Over")
RANKS: Final = Tab(key="2", name="ranks", title="Ranks", short="Rank")
COMMUNICATION: Final = Tab(key="3", name="communication", title="Communication", short="Comm")
PIPELINE: Final = Tab(key="4", name="pipeline", title="Pipeline", short="Pipe")
DEVICES: Final = Tab(key="5", name="devices", title="Devices", short="Dev")
MEMORY: Final = Tab(key="6", name="memory", title="Memory", short="Mem")
EVENTS: Final = Tab(key="7", name="events", title="Events", short="Evt")
MESH: Final = Tab(key="8", name="mesh", title="Mesh", short="Mesh")
PLAN: Final = Tab(key="9", name="plan", title="Plan", short="Plan")
JOBS: Final = Tab(key="0", name="jobs", title="Jobs", short="Jobs")

PAGE_TABS: Final = (OVERVIEW, RANKS, COMMUNICATION, PIPELINE, DEVICES, MEMORY, EVENTS, MESH, PLAN)
TABS: Final = (*PAGE_TABS, JOBS)
