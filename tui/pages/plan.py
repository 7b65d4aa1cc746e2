"""Page 9: the division of layers over the tensor axis, and its traffic."""

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
from boltmesh.tui.panels.help import TRAFFIC_TERMS, PageHelp
from boltmesh.tui.panels.plan_table import COLUMNS, draw_plan, nothing_planned, shown_plan
from boltmesh.tui.panels.traffic import draw_axis
from boltmesh.tui.render.tabs import Tab
from boltmesh.tui.state import State

PLAN = Table(name="plan", columns=COLUMNS, draw=draw_plan, rows=shown_plan)
LEAST_PLAN = 6
"""Lines that the table keeps for itself, whatever the axis moves."""


class PlanPage(Page):
    """The plan above, and below it the measured and the planned traffic of the tensor axis."""

    tab = Tab("plan", "Plan", key="9")
    help = PageHelp(
        about="plan: how layers are divided over the tensor axis, and why",
        keys=(("j k", "choose a row to see all of it"),),
        terms=(
            ("style", "column, row: outputs, inputs of a product; vocab-parallel: tokens;"),
            ("", "replicated: every rank has all of it"),
            ("parts", "of the divided dimension, as count x size: 3x24x128 are three"),
            ("", "times 24 parts of 128, and each rank has some of the 24"),
            ("per rank", "bytes that one rank keeps, of all parameters of the row together"),
            ("each step", "what they make the ranks of the axis sum or gather"),
            *TRAFFIC_TERMS,
        ),
    )
    tables = (PLAN,)
    keys = (("j k", "one row in full"),)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The table takes the room that its traffic leaves; without a plan it gives the reason."""
        state, look = scene.state, scene.look
        rows = [row for row in traffic_rows(state.job) if row.axis == "tensor"]
        size = scene.title + 1 + len(rows) if rows and state.job.tensor_plan is not None else 0
        needed = size + 1 + len(table_draw(PLAN, scene)(body.width, body.height))
        body, trends = with_trends(scene, body, needed, ("memory_bytes", "bytes_per_s"))
        items = [Item("plan", min(LEAST_PLAN, body.height), body.height, 1, grows=True)]
        if size:
            items[0] = items[0]._replace(ideal=max(items[0].least, body.height - size))
            items.append(Item("axis", size, size, 2))
        draws: dict[str, Draw] = {
            "plan": table_draw(PLAN, scene),
            "axis": partial(draw_axis, state, look=look, axis="tensor"),
        }
        return [*place(stack(body, items), draws), *trends]

    @override
    def empty_reason(self, state: State) -> Sequence[str]:
        return () if state.job.mesh.get("tensor", 1) > 1 else nothing_planned(state.job)


PAGE: Final[Page] = PlanPage()
