"""Page 6: what memory is used for, beside what was predicted."""

from typing import Final

from boltmesh.tui.drawing.memory import COLUMNS, draw_memory, shown_memory
from boltmesh.tui.layout.region import Region
from boltmesh.tui.pages import tabs
from boltmesh.tui.pages.page import Keys, Page, table_draw
from boltmesh.tui.pages.panel import Panel, Scene
from boltmesh.tui.pages.table import Table

MEMORY = Table(name="memory", columns=COLUMNS, draw=draw_memory, rows=shown_memory)


class MemoryPage:
    """One table that fills the screen."""

    tab = tabs.MEMORY
    tables = (MEMORY,)
    keys: Keys = ()

    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The table has all of the room."""
        return [Panel("memory", body, table_draw(MEMORY, scene))]


PAGE: Final[Page] = MemoryPage()
