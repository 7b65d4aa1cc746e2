"""Page ``v``: this run beside another one."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import Page, Panel, Scene, Table, table_draw
from boltmesh.tui.layout.region import Region
from boltmesh.tui.panels.differences import (
    DIFFERENCE_COLUMNS,
    draw_differences,
    shown_differences,
)
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.panels.history import draw_history, history_window
from boltmesh.tui.render.tabs import Tab
from boltmesh.tui.state import State

DIFFERENCES: Final = Table(
    name="differences",
    columns=DIFFERENCE_COLUMNS,
    draw=draw_differences,
    rows=shown_differences,
    has_cursor=True,
)
LEAST_TABLE = 9
"""Lines of the table beside charts."""


class ComparePage(Page):
    """Charts with both runs above the table of differences."""

    tab = Tab("compare", "Compare", key="v", is_listed=False)
    help = PageHelp(
        about="compare: this run and the one named behind it, boltmesh top A B",
        keys=(
            ("left right", "a cursor that reads the values of both; esc ends it"),
            ("z Z, < >", "zoom and pan"),
            ("x", "time since each job began instead of steps, and back"),
            ("h", "all charts, with both runs"),
        ),
        terms=(
            ("a / b", "newest values of this run, and of the other, dashed"),
            ("difference", "this run's number over the other's, less one"),
        ),
    )
    keys = (("arrows", "cursor"), ("x", "time"), ("h", "charts"))
    tables = (DIFFERENCES,)
    charts = staticmethod(history_window)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The table has a half or more, the charts the rest."""
        room = max(0, min(body.height // 2, body.height - LEAST_TABLE - 1))
        table = table_draw(DIFFERENCES, scene)
        if room < 6:
            return [Panel("differences", body, table)]
        above, below = body.split_off_top(room)
        draw = partial(draw_history, scene.state, look=scene.look, view=scene.view)
        return [
            Panel("history", above, draw),
            Panel("differences", below.split_off_top(1)[1], table),
        ]

    @override
    def empty_reason(self, state: State) -> Sequence[str]:
        if state.other is not None:
            return ()
        return ("No other run is open. 'boltmesh top RUN OTHER' compares two, or recordings.",)


PAGE: Final[Page] = ComparePage()
