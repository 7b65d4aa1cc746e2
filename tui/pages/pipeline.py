"""Page 4: how much of the pipeline's time is idle, and when."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import Page, Panel, Scene, place, with_trends
from boltmesh.tui.layout.region import Item, Region, stack
from boltmesh.tui.panels.bubble import boundaries, draw_boundaries, draw_bubble
from boltmesh.tui.panels.gantt import draw_gantt
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.render.ranks import NO_PIPELINE
from boltmesh.tui.render.tabs import Tab
from boltmesh.tui.state import State

LINES_BESIDE_RANKS = 7
"""Lines of the bubble panel: summary, head of the table, mean, key of the signs, definitions."""


class PipelinePage(Page):
    """The bubble of each stage above, then the traffic over the boundaries, then the last step."""

    tab = Tab("pipeline", "Pipeline", key="4")
    help = PageHelp(
        about="pipeline: when the stages work and when they wait",
        terms=(
            ("bubble", "share of the stages' common time in which a stage is idle"),
            ("structural", "what the schedule costs even with equal stages"),
            ("imbalance", "what unequal stages add to it"),
            ("excess", "what is left: communication, host, noise"),
        ),
    )

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The chart of the step grows; without a pipeline one panel says so."""
        state, look = scene.state, scene.look
        plan = state.job.pipeline
        ranks = 0 if plan is None else len(plan.order) or state.job.mesh.get("pipeline", 1)
        # Summary, table and mean; the legend comes when each rank has its row in the chart below.
        bubble = scene.title + ranks + LINES_BESIDE_RANKS
        items = [Item("bubble", min(4, body.height), bubble, 1, grows=not ranks)]
        if ranks:
            gantt = scene.title + ranks
            items[0] = Item("bubble", min(scene.title + ranks + 3, body.height), bubble, 2)
            items.append(Item("gantt", gantt + 1, gantt + 2, 1, grows=True))
        if between := boundaries(state.job):
            size = scene.title + 1 + len(between)
            items.insert(1, Item("boundaries", size, size, 3))
        needed = sum(item.ideal for item in items)
        body, trends = with_trends(scene, body, needed, ("bubble_ratio", "step_s"))
        panels = place(
            stack(body, items),
            {
                "bubble": partial(draw_bubble, state, look=look),
                "boundaries": partial(draw_boundaries, state, look=look),
                "gantt": partial(draw_gantt, state, look=look),
            },
        )
        return [*panels, *trends]

    @override
    def empty_reason(self, state: State) -> Sequence[str]:
        return () if state.job.mesh.get("pipeline", 1) > 1 else (NO_PIPELINE,)


PAGE: Final[Page] = PipelinePage()
