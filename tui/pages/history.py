"""Page ``h``: charts of the whole run."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import Page, Panel, Scene
from boltmesh.tui.layout.region import Region
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.panels.history import charts, draw_history, history_window
from boltmesh.tui.render.tabs import Tab
from boltmesh.tui.state import State


class HistoryPage(Page):
    """One grid of charts that fills the screen."""

    tab = Tab("history", "History", key="h", is_listed=False)
    help = PageHelp(
        about="history: the logged metrics and the cost of a step over the whole run",
        keys=(
            ("left right", "a cursor that reads the values; a click puts it; esc ends it"),
            ("up down", "further charts"),
            ("z Z", "half of the steps; twice as many"),
            ("< >", "earlier steps; later ones"),
            ("x", "time since the job began instead of steps, and back"),
            ("e", "moving mean, and back"),
            ("L", "logarithmic axes, and back"),
        ),
        terms=(
            ("step time", "of an optimizer step of rank 0, over 8 ordinary batches"),
            ("a, b", "two metrics on the same axes, the second one drawn over the first"),
            ("utilisation", "of the GPU of rank 0; of its process in percent of a core on CPUs"),
        ),
    )
    keys = (
        ("arrows", "cursor"),
        ("z Z", "zoom"),
        ("< >", "pan"),
        ("x", "time"),
        ("e", "smooth"),
        ("L", "log axis"),
    )
    charts = staticmethod(history_window)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """One panel draws all charts, for it knows how many fit."""
        draw = partial(draw_history, scene.state, look=scene.look, view=scene.view)
        return [Panel("history", body, draw)]

    @override
    def empty_reason(self, state: State) -> Sequence[str]:
        return () if charts(state) else ("Nothing is recorded yet, the first steps run.",)


PAGE: Final[Page] = HistoryPage()
