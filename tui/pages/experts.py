"""Page ``r``: how the router loads the experts."""

from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import Page, Panel, Scene, Table, table_draw, with_trends
from boltmesh.tui.layout.region import Region
from boltmesh.tui.metrics.experts import layer_loads
from boltmesh.tui.panels.experts import EXPERT_COLUMNS, draw_experts, shown_experts
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.render.tabs import Tab
from boltmesh.tui.state import State

EXPERTS: Final = Table(
    name="experts",
    columns=EXPERT_COLUMNS,
    draw=draw_experts,
    rows=shown_experts,
    has_cursor=True,
)


class ExpertsPage(Page):
    """The table, and below it trends if they find room."""

    tab = Tab("experts", "Experts", key="r", is_listed=False)
    help = PageHelp(
        about="experts: rows that the router sends to each expert, by layer",
        terms=(
            ("cell", "rows of an expert over the mean, in the newest seconds; of several"),
            ("", "experts in one cell the one with most"),
            ("max/mean", "rows of the expert with most over the mean: 1 is even"),
            ("idle", "experts without a row"),
            ("rows", "choices of all ranks since the run began, without recomputation"),
            ("dropped", "share of them that found their expert full (expert_capacity);"),
            ("", "tokens that a router drops itself are not counted"),
        ),
    )
    tables = (EXPERTS,)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The table takes the room that it needs."""
        needed = scene.title + 3 + len(layer_loads(scene.state.job))
        body, trends = with_trends(scene, body, needed, ("step_s", "bytes_per_s"))
        return [Panel("experts", body, table_draw(EXPERTS, scene)), *trends]

    @override
    def empty_reason(self, state: State) -> Sequence[str]:
        if any(rank.experts for rank in state.job.ranks):
            return ()
        return (
            "No rows of experts are counted.",
            (
                "That is done for experts that are divided over ranks, as with bolt_expert, and "
                "written every two seconds."
            ),
        )


PAGE: Final[Page] = ExpertsPage()
