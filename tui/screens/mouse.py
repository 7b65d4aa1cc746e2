"""What the mouse does: the same as the keys, where it points."""

from typing import Final

from textual import events

from boltmesh.tui.pages.overview import chosen_heat
from boltmesh.tui.pages.page import TABS
from boltmesh.tui.pages.registry import RANK
from boltmesh.tui.pages.table import Table, row_at, title_at
from boltmesh.tui.panels.heatmap import rank_at
from boltmesh.tui.panels.mesh_map import rank_on_map
from boltmesh.tui.render.tabs import tab_at
from boltmesh.tui.screens.navigation import ChoosingScreen
from boltmesh.tui.widgets.canvas import Drawn

WHEEL_ROWS = 3
_MAPS: Final = {"heat": rank_at, "map": rank_on_map}
"""By the panel that shows a map of ranks, what finds the rank under the pointer."""


class PointingScreen(ChoosingScreen):
    """Clicks switch, sort, select and drill; the wheel scrolls."""

    def on_click(self, event: events.Click) -> None:
        """Do what belongs to the cell under the pointer."""
        drawn = self.drawn_at(event.screen_x, event.screen_y)
        if drawn is None or self.scene is None:
            return
        region = drawn.panel.region
        x, y = event.screen_x - region.x, event.screen_y - region.y
        is_double = event.chain >= 2
        if drawn.panel.name == "tabs":
            self._click_tab(region.width, x)
        elif drawn.panel.name in _MAPS:
            self._click_rank(drawn, x, y, is_double=is_double)
        else:
            for table in self.page.tables:
                if table.name == drawn.panel.name:
                    self._click_table(table, drawn, x, y, is_double=is_double)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Go down in the table under the pointer."""
        self._scroll(event, WHEEL_ROWS)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Go up in the table under the pointer."""
        self._scroll(event, -WHEEL_ROWS)

    def _click_tab(self, width: int, x: int) -> None:
        tabs = TABS if self.dashboard.has_jobs else TABS[:-1]
        name = tab_at(tabs, self.page.tab.name, width, x)
        if name == "jobs":
            self.dashboard.action_show_jobs()
        elif name is not None:
            self.show_page(name)

    def _click_rank(self, drawn: Drawn, x: int, y: int, *, is_double: bool) -> None:
        scene = self.scene
        if scene is None:
            return
        find = _MAPS[drawn.panel.name]
        rank = find(
            scene.state,
            drawn.panel.region.width,
            drawn.panel.region.height,
            x,
            y,
            look=scene.look,
            figure=chosen_heat(scene),
        )
        if rank is None:
            return
        self.session.choose(rank=rank)
        if is_double:
            self.show_rank(rank)
        self.paint()

    def _click_table(self, table: Table, drawn: Drawn, x: int, y: int, *, is_double: bool) -> None:
        scene = self.scene
        if scene is None:
            return
        view = scene.view.table(table.name)
        if len(self.page.tables) > 1:
            self.activate(table.name)
        column = title_at(drawn.lines, table.columns, x, y)
        if column is not None:
            self.sort_by(
                table, column, is_descending=view.sort == column and not view.is_descending
            )
            return
        draw = self.draw_view(table)
        if draw is None:
            return
        num_rows = len(table.rows(scene.state, view))
        row = row_at(draw, self.window(table), num_rows, y)
        if row is not None:
            self.select(table, row)
            if is_double:
                self.action_drill()

    def _scroll(self, event: events.MouseEvent, by: int) -> None:
        drawn = self.drawn_at(event.screen_x, event.screen_y)
        if self.page is RANK or drawn is None:
            return
        for table in self.page.tables:
            if table.name == drawn.panel.name:
                self._move_row(table, by)
