"""Page 2: a line for each rank; and one rank in full."""

from typing import Final

from boltmesh.tui.layout import page
from boltmesh.tui.layout.page import Keys, Page, Panel, Scene, Table, table_draw
from boltmesh.tui.layout.region import Region
from boltmesh.tui.panels.rank_detail import draw_rank_detail
from boltmesh.tui.panels.rank_table import COLUMNS, draw_rank_table, shown_ranks

RANKS = Table(
    name="ranks",
    columns=COLUMNS,
    draw=draw_rank_table,
    rows=shown_ranks,
    rank_of=lambda row: int(row.rank),
)


class RanksPage:
    """All ranks, sorted and filtered as one likes."""

    tab = page.RANKS
    tables = (RANKS,)
    keys: Keys = (("enter", "one rank"),)

    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """One table that fills the screen."""
        return [Panel("ranks", body, table_draw(RANKS, scene))]


class RankPage:
    """One rank; reached from wherever a rank is selected."""

    tab = page.RANKS
    tables: tuple[Table, ...] = ()
    keys: Keys = (("j k", "next, previous rank"), ("esc", "back"))

    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """One panel that fills the screen."""
        state, look = scene.state, scene.look
        rank = scene.view.rank or 0
        return [
            Panel(
                "rank",
                body,
                lambda width, height: draw_rank_detail(state, width, height, look, rank=rank),
            )
        ]


PAGE: Final[Page] = RanksPage()
