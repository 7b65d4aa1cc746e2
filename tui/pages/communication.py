"""Page 3: measured and expected traffic between the ranks."""

from functools import partial
from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import Page, Panel, Scene, Table, place, table_draw, with_trends
from boltmesh.tui.layout.region import Item, Region, stack
from boltmesh.tui.panels.help import TRAFFIC_TERMS, PageHelp
from boltmesh.tui.panels.peers import draw_peers
from boltmesh.tui.panels.traffic import COLUMNS, draw_traffic, shown_traffic
from boltmesh.tui.render.tabs import Tab

TRAFFIC = Table(
    name="traffic",
    columns=COLUMNS,
    draw=draw_traffic,
    rows=shown_traffic,
)


class CommunicationPage(Page):
    """Groups and operators above, the matrix of senders and receivers below or beside."""

    tab = Tab("communication", "Communication", key="3")
    help = PageHelp(
        about="communication: what ranks send to each other, beside what they should",
        terms=TRAFFIC_TERMS,
    )
    tables = (TRAFFIC,)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The table takes the room that it needs; the matrix of peers takes the rest."""
        state, look, view = scene.state, scene.look, scene.view.table(TRAFFIC.name)
        rows = len(TRAFFIC.rows(state, view))
        has_peers = any(rank.peers for rank in state.job.ranks)
        peers = scene.title + 3 + len(state.job.ranks) if has_peers else 0
        # Words about the selected row, or about rows that differ, may need the room of charts.
        table = len(draw_traffic(state, body.width, body.height, look, table=view))
        needed = peers + (scene.title + 8 + rows if has_peers else table)
        body, trends = with_trends(scene, body, needed, ("bytes_per_s", "step_s"))
        plan = stack(
            body,
            (
                Item(
                    "traffic",
                    min(body.height, scene.title + 3 + rows),
                    scene.title + 8 + rows,
                    1,
                    grows=not has_peers,
                ),
                Item("peers", min(peers, scene.title + 5), peers, 2, grows=True),
            ),
        )
        panels = place(
            plan,
            {
                "traffic": table_draw(TRAFFIC, scene),
                "peers": partial(draw_peers, state, look=look),
            },
        )
        return [*panels, *trends]


PAGE: Final[Page] = CommunicationPage()
