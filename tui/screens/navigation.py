"""The keys that change how a job is looked at: rows, columns, metrics, figures."""

import msgspec
from textual import events
from typing_extensions import override

from boltmesh.tui.layout.page import (
    RankMap,
    Table,
    WindowOf,
    next_column,
)
from boltmesh.tui.metrics.heat import HEAT_FIGURES, chosen_heat
from boltmesh.tui.pages.ranks import RANK
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.panels.chart import chosen_metric
from boltmesh.tui.panels.history import has_clock
from boltmesh.tui.screens.live import LiveScreen
from boltmesh.tui.state import metric_names

MAX_ZOOM = 8
CURSOR_STEPS = 50
"""Presses of an arrow from one side of a chart to the other."""


class NavigationScreen(LiveScreen):
    """Keys whose meaning depends on the page; one without a meaning there does nothing."""

    def show_page(self, name: str) -> None:
        """Go to another page; from one that has no place in the line of tabs, esc goes back.

        The output is that of the chosen rank.
        """
        page = PAGES[name]
        before = self.page if self.page.tab.is_listed else self.page_before
        self.page, self.page_before = page, None if page.tab.is_listed else before
        if name == "output" and self.session.view.rank is not None:
            words = f"rank={self.session.view.rank}"
            self.session.look_at_table("output", filter=words, first=0, selected=None)
        self.place_cursor()
        self.paint()

    def show_rank(self, rank: int) -> None:
        """Show one rank in full."""
        if self.page is not RANK:
            self.page_before = self.page
        self.page = RANK
        self.session.choose(rank=rank)
        self.paint()

    def leave_page(self) -> bool:
        """Go back from a rank or a page beside the tabs; return whether there was one."""
        if self.page_before is None:
            return False
        self.page, self.page_before = self.page_before, None
        self.paint()
        return True

    def show_metric(self, name: str) -> None:
        """Show a metric in the chart."""
        self.session.choose(metric=name)
        self.paint()

    def show_heat(self, figure: str) -> None:
        """Show a figure in the heat map."""
        self.session.choose(heat_figure=figure)
        self.paint()

    def sort_by(self, table: Table, column: str | None, *, is_descending: bool = False) -> None:
        """Sort a table; the window goes back to its first row."""
        self.session.look_at_table(
            table.name, sort=column, is_descending=is_descending, first=0, selected=None
        )
        self.place_cursor()
        self.paint()

    def select(self, table: Table, row: int) -> None:
        """Select a row, and its rank."""
        scene = self.scene
        if scene is None:
            return
        drawn = self.canvas.drawn_panel(table.name)
        first = None if drawn is None else drawn.first_row()
        window = {} if first is None else {"first": first}
        view = self.session.look_at_table(table.name, selected=row, **window)
        rank = table.selected_rank(scene.state, view)
        if rank is not None:
            self.session.choose(rank=rank)
        self.paint()

    @override
    def on_key(self, event: events.Key) -> None:
        """Go to the page that the key opens; Textual calls the handler of the base class too."""
        page = PAGES.with_key(event.key)
        if page is not None:
            event.stop()
            self.show_page(page.tab.name)

    def action_next_page(self, by: int) -> None:
        """Go to the next page, or the previous one; after the last comes the first."""
        page = self.page if self.page.tab.is_listed else self.page_before or PAGES["overview"]
        names = [tab.name for tab in PAGES.tabs]
        self.show_page(names[(names.index(page.tab.name) + by) % len(names)])

    def action_next_metric(self, by: int) -> None:
        """Show another metric in the chart."""
        scene = self.scene
        names = () if scene is None else metric_names(scene.state)
        shown = None if scene is None else chosen_metric(scene.state, scene.view)
        if shown is not None:
            self.show_metric(names[(names.index(shown) + by) % len(names)])

    def action_toggle_log(self) -> None:
        """Put the chart's values on a logarithmic axis, or back on a linear one."""
        self.session.choose(is_log=not self.session.view.is_log)
        self.paint()

    def action_zoom(self, by: int) -> None:
        """Show the newest half of the steps in the charts, or twice as many."""
        view = self.session.view
        zoom = min(max(0, view.zoom + by), MAX_ZOOM)
        self.session.choose(zoom=zoom, pan=view.pan if zoom else None)
        self.paint()

    def action_pan(self, by: int) -> None:
        """Show earlier or later steps in the charts of this page, by half of the visible range."""
        scene, window_of = self.scene, self.page.charts
        if scene is None or window_of is None:
            return
        if not scene.view.zoom:
            self.say("all steps are shown; z shows the newest half")
            return
        first, last = window_of(scene.state, scene.view)
        self._pan_to(window_of, last + by * (last - first) / 2)

    def _pan_to(self, window_of: WindowOf, last: float) -> None:
        """Let the charts end at a step; at the newest they follow the run again."""
        scene = self.scene
        if scene is None:
            return
        view = msgspec.structs.replace(scene.view, pan=last)
        newest = window_of(scene.state, msgspec.structs.replace(view, pan=None))[1]
        pan = None if last >= newest else window_of(scene.state, view)[1]
        self.session.choose(pan=pan)
        self.paint()

    def _move_cursor(self, window_of: WindowOf, by: int) -> None:
        """Move the cursor of the charts by a fiftieth; the visible range follows it."""
        scene = self.scene
        if scene is None:
            return
        first, last = window_of(scene.state, scene.view)
        whole = window_of(scene.state, msgspec.structs.replace(scene.view, zoom=0))
        cursor = last if scene.view.cursor is None else scene.view.cursor
        cursor = min(max(cursor + by * (last - first) / CURSOR_STEPS, whole[0]), whole[1])
        self.put_cursor(cursor)
        if cursor < first:
            self._pan_to(window_of, last - (first - cursor))
        elif cursor > last:
            self._pan_to(window_of, cursor)

    def put_cursor(self, cursor: float | None) -> None:
        """Let the charts tell their values at a step, or their newest ones."""
        self.session.choose(cursor=cursor)
        self.paint()

    def _choose_row(self, row: int) -> None:
        self.session.choose(chart_row=max(0, row))
        self.paint()

    def action_toggle_time(self) -> None:
        """Use seconds as the axis of the charts of the run, or steps again."""
        if self.page.charts is None:
            return
        is_time = not self.session.view.is_time
        state = self.session.state
        if is_time and (state is None or not has_clock(state)):
            self.say("the times of the steps are not known yet")
            return
        self.session.choose(is_time=is_time, pan=None, cursor=None)
        self.paint()

    def action_toggle_smooth(self) -> None:
        """Show moving means in the charts, or the values."""
        self.session.choose(is_smooth=not self.session.view.is_smooth)
        self.paint()

    def action_next_heat(self, by: int) -> None:
        """Show another figure in the heat map."""
        scene = self.scene
        if scene is not None:
            place = HEAT_FIGURES.index(chosen_heat(scene.view))
            self.show_heat(HEAT_FIGURES[(place + by) % len(HEAT_FIGURES)])

    def action_sort(self) -> None:
        """Sort the table by its next column."""
        table = self.table
        if table is not None:
            self.sort_by(table, next_column(table, self.session.view.table(table.name)))

    def action_reverse(self) -> None:
        """Sort the other way round."""
        table = self.table
        if table is None:
            return
        view = self.session.view.table(table.name)
        if view.sort is None:
            self.say("press s first to choose a column")
        else:
            self.sort_by(table, view.sort, is_descending=not view.is_descending)

    def action_next_table(self) -> None:
        """Let the keys work on the page's other table."""
        table = self.table
        if table is not None:
            names = [item.name for item in self.page.tables]
            self.activate(names[(names.index(table.name) + 1) % len(names)])

    def activate(self, name: str) -> None:
        """Let the keys work on a table of this page."""
        active = {**self.session.view.active, self.page.tab.name: name}
        self.session.choose(active=active)
        if self.session.view.table(name).selected is None:
            self.session.look_at_table(name, selected=0)
        self.paint()

    def action_move(self, across: int, down: int) -> None:
        """Select the next row, or the next rank; at the ends nothing happens."""
        scene, table = self.scene, self.table
        if scene is None:
            return
        if self.page is RANK:
            self._move_rank(across + down)
        elif self.page.rank_map is not None:
            self._move_on_map(self.page.rank_map, across, down)
        elif self.page.charts is not None and across:
            self._move_cursor(self.page.charts, across)
        elif self.page.charts is not None and table is None:
            self._choose_row(self.session.view.chart_row + down)
        elif across:
            self.action_next_page(across)
        elif table is not None:
            self.move_row(table, down)

    def action_turn(self, by: int) -> None:
        """Select the row a page further."""
        height = max(1, self.size.height - 8)
        if self.table is not None:
            self.move_row(self.table, by * height)

    def action_jump(self, row: int) -> None:
        """Select the first row, or with -1 the last."""
        scene, table = self.scene, self.table
        if scene is not None and table is not None:
            num_rows = len(table.rows(scene.state, scene.view.table(table.name)))
            if num_rows:
                self.select(table, row % num_rows)

    def action_drill(self) -> None:
        """Show the selected rank in full."""
        scene, table = self.scene, self.table
        if scene is None or self.page is RANK:
            return
        has_map = self.page.rank_map is not None
        rank = scene.view.rank if has_map else None
        if table is not None and rank is None:
            if scene.view.table(table.name).selected is None:
                self.move_row(table, 0)
            rank = table.selected_rank(scene.state, self.session.view.table(table.name))
        if rank is not None:
            self.show_rank(rank)
        elif table is not None:
            rows = table.rows(scene.state, scene.view.table(table.name))
            self.say("this row is about no single rank" if rows else "this table has no row")

    def move_row(self, table: Table, by: int) -> None:
        """Select the row that is so many further; at the ends, the first or the last."""
        scene = self.scene
        if scene is None:
            return
        view = scene.view.table(table.name)
        num_rows = len(table.rows(scene.state, view))
        if num_rows:
            row = 0 if view.selected is None else view.selected + by
            self.select(table, min(max(0, row), num_rows - 1))

    def _move_on_map(self, rank_map: RankMap, across: int, down: int) -> None:
        scene = self.scene
        if scene is None:
            return
        drawn = self.canvas.drawn_panel(rank_map.panel)
        width, height = (0, 0) if drawn is None else drawn.panel.region[2:]
        rank = rank_map.rank_beside(
            scene.state,
            width,
            height,
            scene.view.rank,
            across,
            down,
            look=scene.look,
            figure=chosen_heat(scene.view),
        )
        if rank is not None:
            self.session.choose(rank=rank)
            self.paint()

    def _move_rank(self, by: int) -> None:
        scene = self.scene
        ranks = [] if scene is None else [rank.rank for rank in scene.state.job.ranks]
        if scene is None or not ranks:
            return
        if scene.view.rank in ranks:
            place = ranks.index(scene.view.rank) + by
            rank = ranks[min(max(0, place), len(ranks) - 1)]
        else:
            rank = ranks[0]
        self.session.choose(rank=rank)
        self.paint()
