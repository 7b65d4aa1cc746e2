"""Page ``n``: how even the context axis divides the work, and its largest messages."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import (
    Draw,
    Page,
    Panel,
    Scene,
    Table,
    place,
    table_draw,
    with_trends,
)
from boltmesh.tui.layout.region import Item, Region, stack
from boltmesh.tui.metrics.traffic import traffic_rows
from boltmesh.tui.panels.context import AXIS, CONTEXT_COLUMNS, draw_context, shown_context
from boltmesh.tui.panels.help import TRAFFIC_TERMS, PageHelp
from boltmesh.tui.panels.traffic import draw_axis
from boltmesh.tui.render.tabs import Tab
from boltmesh.tui.state import State

WORK: Final = Table(
    name="context",
    columns=CONTEXT_COLUMNS,
    draw=draw_context,
    rows=shown_context,
    rank_of=lambda row: int(row.rank),
    has_cursor=True,
)
LEAST_TABLE = 6


class ContextPage(Page):
    """The ranks, below them the traffic of the axis, then trends if they find room."""

    tab = Tab("context", "Context", key="n", is_listed=False)
    help = PageHelp(
        about="context: work of each rank of the context axis, and its largest messages",
        terms=(
            ("part", "place on the axis; it decides which positions the rank has"),
            ("work", "compute time beside the median of the ranks"),
            ("comm", "time of a step that the rank waits for communication"),
            ("largest", "the operator of the axis with the largest messages, and their"),
            ("message", "mean size since the run began"),
            *TRAFFIC_TERMS,
        ),
    )
    tables = (WORK,)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The traffic takes the room that the table leaves."""
        state, look = scene.state, scene.look
        rows = [row for row in traffic_rows(state.job) if row.axis == AXIS]
        needed = 2 * (scene.title + 1) + len(state.job.ranks) + len(rows)
        body, trends = with_trends(scene, body, needed, ("step_s", "bytes_per_s"))
        size = scene.title + 1 + len(rows) if rows else 0
        whole = scene.title + 1 + len(state.job.ranks)
        least = min(LEAST_TABLE, whole, body.height)
        items = [
            Item("context", least, max(least, body.height - size), 1, grows=True),
            Item("axis", size, size, 2),
        ]
        draws: dict[str, Draw] = {
            "context": table_draw(WORK, scene),
            "axis": partial(draw_axis, state, look=look, axis=AXIS),
        }
        return [*place(stack(body, items), draws), *trends]

    @override
    def empty_reason(self, state: State) -> Sequence[str]:
        if state.job.mesh.get(AXIS, 1) > 1:
            return ()
        return ("This job has no context axis: every rank has whole sequences.",)


PAGE: Final[Page] = ContextPage()
