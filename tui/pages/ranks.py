"""Page 2: a line for each rank; and one rank in full."""

from functools import partial
from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import Page, Panel, Scene, Table, table_draw, with_trends
from boltmesh.tui.layout.region import Region
from boltmesh.tui.panels.help import DEVICE_TERMS, PageHelp
from boltmesh.tui.panels.rank_detail import draw_rank_detail
from boltmesh.tui.panels.rank_table import COLUMNS, draw_rank_table, shown_ranks
from boltmesh.tui.render.tabs import Tab

RANKS = Table(
    name="ranks",
    columns=COLUMNS,
    draw=draw_rank_table,
    rows=shown_ranks,
    rank_of=lambda row: int(row.rank),
    has_cursor=True,
)


class RanksPage(Page):
    """All ranks, sorted and filtered as one likes."""

    tab = Tab("ranks", "Ranks", key="2")
    help = PageHelp(
        about="ranks: a line for each process of the job",
        keys=(("enter", "the selected rank in full; there j k go through the ranks"),),
        terms=(
            ("step time", "mean of the newest ordinary optimizer steps"),
            ("split", "their phases, in the signs and colours of the overview"),
            ("waits", "exposed communication of a step"),
            ("slower", "compute time beside that of the ranks that do the same work"),
            *DEVICE_TERMS,
        ),
    )
    tables = (RANKS,)
    keys = (("enter", "one rank"),)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The table, and below it the trends of a step if they find room."""
        needed = scene.title + 1 + len(scene.state.job.ranks)
        table, trends = with_trends(scene, body, needed, ("step_s", "tokens_per_s"))
        return [Panel("ranks", table, table_draw(RANKS, scene)), *trends]


class RankPage(Page):
    """One rank; reached from wherever a rank is selected."""

    tab = RanksPage.tab
    help = RanksPage.help
    keys = (("j k", "next, previous rank"), ("esc", "back"))

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """One panel that fills the screen."""
        rank = scene.view.rank or 0
        draw = partial(draw_rank_detail, scene.state, look=scene.look, rank=rank)
        return [Panel("rank", body, draw)]


PAGE: Final[Page] = RanksPage()
RANK: Final[Page] = RankPage()
"""One rank in full; it has no tab of its own."""
