"""Page 1: what is wrong, what the job achieves, where its time goes, how its ranks are."""

from typing import Final

from boltmesh.tui.layout.overview import Contents, plan_overview
from boltmesh.tui.layout.region import Region
from boltmesh.tui.metrics.heat import HEAT_FIGURES
from boltmesh.tui.metrics.step_time import step_split
from boltmesh.tui.metrics.verdict import traffic_rows
from boltmesh.tui.pages import page
from boltmesh.tui.pages.page import Draw, Keys, Page, Panel, Scene, place, table_draw
from boltmesh.tui.pages.ranks import RANKS
from boltmesh.tui.pages.table import Table
from boltmesh.tui.panels.chart import draw_chart
from boltmesh.tui.panels.communication import draw_communication
from boltmesh.tui.panels.diagnosis import diagnosis_lines, draw_diagnosis
from boltmesh.tui.panels.events import draw_events, timeline
from boltmesh.tui.panels.heatmap import draw_heatmap, heatmap_lines
from boltmesh.tui.panels.metrics import draw_metrics, newest_metrics
from boltmesh.tui.panels.phases import draw_phases
from boltmesh.tui.panels.throughput import draw_throughput
from boltmesh.tui.state import metric_names


class OverviewPage:
    """The first screen of a job."""

    tab = page.OVERVIEW
    tables: tuple[Table, ...] = (RANKS,)
    keys: Keys = (("m", "metric"), ("y", "log axis"), ("f", "heat map"), ("enter", "one rank"))

    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """Place what there is to show, the most important where the room is short."""
        plan = plan_overview(scene.width, body, _contents(scene, body), title=scene.title)
        return place(plan, _draws(scene))


def chosen_metric(scene: Scene, *, later: int = 0) -> str | None:
    """Return the metric that the chart shows, or one that comes ``later``."""
    names = metric_names(scene.state)
    if not names:
        return None
    place = names.index(scene.view.metric) if scene.view.metric in names else 0
    return names[(place + later) % len(names)]


def chosen_heat(scene: Scene) -> str:
    """Return the figure that the heat map shows."""
    figure = scene.view.heat_figure
    return figure if figure in HEAT_FIGURES else HEAT_FIGURES[0]


def _contents(scene: Scene, body: Region) -> Contents:
    state, look = scene.state, scene.look
    split = step_split(state)
    return Contents(
        says=diagnosis_lines(state, body.width, look),
        units=len(draw_throughput(state, body.width, body.height, look)) - scene.title,
        phases=len(split.phases) if split is not None else 1,
        metrics=len(newest_metrics(state)),
        curves=len(metric_names(state)),
        heat=heatmap_lines(state, body.width, look, figure=chosen_heat(scene)) - scene.title,
        ranks=len(state.job.ranks),
        traffic=len(traffic_rows(state.job)) + (state.job.communication_note is not None),
        events=len(timeline(state)),
    )


def _draws(scene: Scene) -> dict[str, Draw]:
    state, view, look = scene.state, scene.view, scene.look

    return {
        "says": lambda width, height: draw_diagnosis(state, width, height, look),
        "chart": lambda width, height: draw_chart(
            state, width, height, look, metric=chosen_metric(scene), is_log=view.is_log
        ),
        "next chart": lambda width, height: draw_chart(
            state, width, height, look, metric=chosen_metric(scene, later=1), is_log=view.is_log
        ),
        "phases": lambda width, height: draw_phases(state, width, height, look),
        "throughput": lambda width, height: draw_throughput(state, width, height, look),
        "metrics": lambda width, height: draw_metrics(
            state, width, height, look, selected=chosen_metric(scene)
        ),
        "heat": lambda width, height: draw_heatmap(
            state, width, height, look, figure=chosen_heat(scene), selected=view.rank
        ),
        "ranks": table_draw(RANKS, scene),
        "communication": lambda width, height: draw_communication(state, width, height, look),
        "events": lambda width, height: draw_events(state, width, height, look),
    }


PAGE: Final[Page] = OverviewPage()
