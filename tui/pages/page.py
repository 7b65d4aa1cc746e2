"""A page: the panels of one screen of a job, and what its keys work on."""

from collections.abc import Sequence
from typing import Protocol

from boltmesh.tui.drawing.tabs import Tab
from boltmesh.tui.layout.region import Plan, Region
from boltmesh.tui.pages.panel import Draw, Panel, Scene
from boltmesh.tui.pages.table import Table
from boltmesh.tui.view import View

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
