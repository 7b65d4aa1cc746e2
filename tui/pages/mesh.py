"""Page 8: one figure of all ranks, laid out by the mesh, and the traffic of each axis."""

from functools import partial
from typing import Final

from typing_extensions import override

from boltmesh.tui.layout.page import Page, Panel, RankMap, Scene, place, with_trends
from boltmesh.tui.layout.region import GUTTER, Item, Plan, Region, stack
from boltmesh.tui.metrics.heat import chosen_heat
from boltmesh.tui.panels.heatmap import draw_places, num_places
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.panels.mesh_map import (
    MeshMap,
    draw_map,
    map_lines,
    map_of,
    rank_beside,
    rank_on_map,
)
from boltmesh.tui.panels.peers import axis_rows, draw_axes
from boltmesh.tui.render.tabs import Tab

PLACES_WIDTH = 46
"""Columns that the figure by place needs beside the map."""

MAP_WIDTH = 72
"""Columns of a small map, for its heading."""

BESIDE_FROM_WIDTH = 110
LEAST_MAP = 4
"""Lines without a heading: of a small mesh with its labels and its scale."""


class MeshPage(Page):
    """The map above, the figure by place beside or below it, the axes' traffic at the bottom."""

    tab = Tab("mesh", "Mesh", key="8")
    help = PageHelp(
        about="mesh: every rank in one figure, laid out by pipeline, data and tensor",
        keys=(
            ("f F", "next, previous figure of the ranks"),
            ("arrows", "choose a rank; j and k too; enter shows it in full"),
        ),
        terms=(
            ("compute", "time of a step without waiting for others; the late rank has most"),
            ("bubble", "idle share of a rank over the whole steps that are recorded"),
            ("bytes/s", "payload of all operators, over the time of a step"),
            ("by place", "mean of the ranks at one place of an axis, beside that of all"),
            ("measured", "bytes of one step on one axis, the mean over the ranks"),
            ("expected", "what the strategy says that a step moves"),
        ),
    )
    keys = (("f", "figure"), ("arrows", "choose"), ("enter", "one rank"))
    rank_map = RankMap("map", rank_on_map, rank_beside)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """The map has a cell for each rank as long as that is possible at all."""
        state, look, view = scene.state, scene.look, scene.view
        figure = chosen_heat(scene.view)
        plan = self._plan(scene, body)
        needed = max(region.y + region.height for region in plan.values()) - body.y
        upper, trends = with_trends(scene, body, needed, ("step_s", "bytes_per_s"))
        panels = place(
            self._plan(scene, upper) if trends else plan,
            {
                "map": partial(draw_map, state, look=look, figure=figure, selected=view.rank),
                "places": partial(draw_places, state, look=look, figure=figure),
                "axes": partial(draw_axes, state, look=look, selected=view.rank),
            },
        )
        return [*panels, *trends]

    def _plan(self, scene: Scene, body: Region) -> Plan:
        state, look, figure = scene.state, scene.look, chosen_heat(scene.view)
        axes = scene.title + 1 + max(1, len(axis_rows(state.job)))
        places = scene.title + 1 + num_places(state)
        beside = body._replace(width=body.width - PLACES_WIDTH - GUTTER)
        room = max(1, body.height - axes)
        if body.width >= BESIDE_FROM_WIDTH:
            found = map_of(state, beside.width, room, look, figure=figure)
            whole = map_of(state, body.width, room, look, figure=figure)
            if found is not None and whole is not None and _size(found) == _size(whole):
                width = min(beside.width, max(MAP_WIDTH, found.width))
                return _beside(body, width, axes, scene.title + 1 + found.height, places)
        lines = map_lines(state, body.width, room, look, figure=figure)
        least = min(body.height, scene.title + LEAST_MAP, lines)
        return stack(
            body,
            (
                Item("map", least, lines, 1),
                Item("places", scene.title + 3, places, 3),
                Item("axes", scene.title + 2, axes, 2),
            ),
        )


def _size(found: MeshMap) -> tuple[int, int]:
    return found.cell_width, found.ranks_per_cell


def _beside(body: Region, width: int, axes: int, lines: int, places: int) -> Plan:
    """Return the plan with a map of this width and height, heading and scale included."""
    upper, lower = body.split_off_top(min(max(lines, places) + 1, max(lines, body.height - axes)))
    left = upper._replace(width=width)
    right = upper._replace(x=left.x + width + GUTTER, width=upper.width - width - GUTTER)
    return {
        "map": left._replace(height=min(lines, left.height)),
        "places": right._replace(height=min(places, right.height)),
        "axes": lower._replace(height=min(axes, lower.height)),
    }


PAGE: Final[Page] = MeshPage()
