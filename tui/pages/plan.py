"""Page 9: how layers are divided over the tensor axis, and what that moves."""

from typing import Final

from boltmesh.tui.layout import page
from boltmesh.tui.layout.page import Keys, Page, Panel, Scene, Table, place, table_draw
from boltmesh.tui.layout.region import Item, Region, stack
from boltmesh.tui.metrics.traffic import traffic_rows
from boltmesh.tui.panels.plan_table import COLUMNS, draw_plan, shown_plan
from boltmesh.tui.panels.traffic import draw_axis

PLAN = Table(name="plan", columns=COLUMNS, draw=draw_plan, rows=shown_plan)
LEAST_PLAN = 6
"""Lines that the table keeps for itself, whatever the axis moves."""


class PlanPage:
    """The plan above, and below what the tensor axis moves beside what the plan makes it move."""

    tab = page.PLAN
    tables = (PLAN,)
    keys: Keys = (("j k", "one row in full"),)

    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The table has what the traffic of its axis leaves; without a plan it says why."""
        state, look = scene.state, scene.look
        items = [Item("plan", min(LEAST_PLAN, body.height), body.height, 1, grows=True)]
        rows = [row for row in traffic_rows(state.job) if row.axis == "tensor"]
        if rows and state.job.tensor_plan is not None:
            size = scene.title + 1 + len(rows)
            items[0] = items[0]._replace(ideal=max(items[0].least, body.height - size))
            items.append(Item("axis", size, size, 2))
        return place(
            stack(body, items),
            {
                "plan": table_draw(PLAN, scene),
                "axis": lambda width, height: draw_axis(state, width, height, look, axis="tensor"),
            },
        )


PAGE: Final[Page] = PlanPage()
