"""Page 4: how much of the pipeline's time is idle, and when."""

from typing import Final

from boltmesh.tui.drawing.bubble import draw_bubble
from boltmesh.tui.drawing.gantt import draw_gantt
from boltmesh.tui.layout.region import Item, Region, stack
from boltmesh.tui.pages import tabs
from boltmesh.tui.pages.page import Keys, Page, place
from boltmesh.tui.pages.panel import Panel, Scene
from boltmesh.tui.pages.table import Table


class PipelinePage:
    """The bubble of each stage above, the last step as it ran below."""

    tab = tabs.PIPELINE
    tables: tuple[Table, ...] = ()
    keys: Keys = ()

    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The chart of the step grows; without a pipeline one panel says so."""
        state, look = scene.state, scene.look
        stages = 0 if state.job.pipeline is None else state.job.pipeline.num_stages
        bubble = scene.title + 6 + stages
        items = [Item("bubble", min(4, body.height), bubble, 1, grows=not stages)]
        if stages:
            items.append(Item("gantt", scene.title + 3, scene.title + 4 + stages, 2, grows=True))
        return place(
            stack(body, items),
            {
                "bubble": lambda width, height: draw_bubble(state, width, height, look),
                "gantt": lambda width, height: draw_gantt(state, width, height, look),
            },
        )


PAGE: Final[Page] = PipelinePage()
