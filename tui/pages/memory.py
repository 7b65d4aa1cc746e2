"""Page 6: what memory is used for, beside what was predicted."""

from typing import Final

from boltmesh.tui.layout import page
from boltmesh.tui.layout.page import Keys, Page, Panel, Scene, Table, table_draw
from boltmesh.tui.layout.region import Region
from boltmesh.tui.panels.memory import COLUMNS, draw_memory, shown_memory

MEMORY = Table(name="memory", columns=COLUMNS, draw=draw_memory, rows=shown_memory)


class MemoryPage:
    """One table that fills the screen."""

    tab = page.MEMORY
    tables = (MEMORY,)
    keys: Keys = ()

    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The table has all of the room."""
        return [Panel("memory", body, table_draw(MEMORY, scene))]


PAGE: Final[Page] = MemoryPage()
