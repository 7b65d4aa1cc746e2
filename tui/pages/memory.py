"""Page 6: memory by kind, measured and predicted."""

from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import Page, Panel, Scene, Table, table_with_trends
from boltmesh.tui.layout.region import Region
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.panels.memory import COLUMNS, draw_memory, shown_memory
from boltmesh.tui.render.tabs import Tab

MEMORY = Table(name="memory", columns=COLUMNS, draw=draw_memory, rows=shown_memory)


class MemoryPage(Page):
    """One table that fills the screen."""

    tab = Tab("memory", "Memory", key="6", short_title="Mem")
    help = PageHelp(
        about="memory: what it is used for, beside what was predicted",
        terms=(
            ("predicted", "what the strategy said before training"),
            ("copies", "of the newest state, see checkpoint_in_memory_every"),
            ("cache", "held for the next tensors, and unused"),
            ("other", "the rest of what the process holds"),
            ("offload", "what goes between the device, the host and the disk:"),
            ("", "median of the ranks; busy is the rank where it takes longest"),
        ),
    )
    tables = (MEMORY,)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The table takes the room that it needs, the memory of the run the rest below."""
        return table_with_trends(scene, body, MEMORY, ("memory_bytes",))


PAGE: Final[Page] = MemoryPage()
