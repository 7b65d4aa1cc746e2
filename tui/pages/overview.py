"""Overview: findings, throughput, where the time of a step goes, the ranks.

Below 100 columns all panels are in one column. From 100 columns on, the step and the throughput are
beside the chart, and the events beside the ranks; from 160 on, the metrics are beside the chart as
well, and the lower half has two columns.
"""

from functools import partial
from typing import Final

import msgspec
from typing_extensions import override

from boltmesh.tui.layout.page import Draw, Page, Panel, RankMap, Scene, place, table_draw
from boltmesh.tui.layout.region import VERY_WIDE, WIDE, Item, Plan, Region, stack
from boltmesh.tui.metrics.heat import chosen_heat
from boltmesh.tui.metrics.step_time import phase_split
from boltmesh.tui.metrics.traffic import traffic_rows
from boltmesh.tui.pages.ranks import RANKS
from boltmesh.tui.panels.chart import chosen_metric, draw_chart, draw_metrics, newest_metrics
from boltmesh.tui.panels.diagnosis import diagnosis_lines, draw_diagnosis
from boltmesh.tui.panels.events import draw_events, timeline
from boltmesh.tui.panels.heatmap import draw_heatmap, heatmap_lines, neighbour, rank_at
from boltmesh.tui.panels.help import TRAFFIC_TERMS, PageHelp
from boltmesh.tui.panels.rank_table import draw_spread
from boltmesh.tui.panels.throughput import draw_phases, draw_throughput
from boltmesh.tui.panels.traffic import draw_communication
from boltmesh.tui.render.tabs import Tab
from boltmesh.tui.state import State, metric_names

FEW_EVENTS = 3
LEAST_HEAT = 4
"""Lines of a small mesh with its labels and its scale; with fewer the ranks lose their places."""
TWO_CHARTS_FROM_HEIGHT = 26


class Contents(msgspec.Struct, frozen=True):
    """How many lines there are to show, without headings."""

    says: int
    """Lines of the job's state and of the diagnosis."""
    units: int
    """Lines of throughput: samples, tokens, FLOPs."""
    phases: int
    metrics: int
    curves: int
    """Metrics that have one."""
    heat: int
    spread: int
    """Lines of minimum, median and maximum over the ranks."""
    ranks: int
    traffic: int
    events: int


def plan_overview(width: int, body: Region, contents: Contents, *, title: int) -> Plan:
    """Return the panels that are shown; ``title`` is the lines of each panel's heading."""
    plan: Plan = {}
    if body.width < 1 or body.height < 1:
        return plan
    if contents.says:
        # A message never displaces the panel that it is about.
        plan["says"], body = body.split_off_top(min(contents.says, max(1, body.height // 2)))
    if title and contents.says:
        _, body = body.split_off_top(1)
    if width < WIDE:
        plan |= _narrow(body, contents, title)
    else:
        plan |= _wide(body, contents, title, is_very_wide=width >= VERY_WIDE)
    return {name: region for name, region in plan.items() if region.height}


def _heat(contents: Contents, title: int, priority: int) -> Item:
    least = min(contents.heat, LEAST_HEAT)
    return Item("heat", title + least, title + contents.heat, priority)


def _narrow(body: Region, contents: Contents, title: int) -> Plan:
    """Where the table of the communication finds no room, a line of it takes the events' place."""
    items = _narrow_items(contents, title)
    plan = stack(body, items)
    if "communication" in plan or not contents.traffic:
        return plan
    line = {"communication": title + 1}
    return stack(body, [each._replace(least=line.get(each.panel, each.least)) for each in items])


def _narrow_items(contents: Contents, title: int) -> tuple[Item, ...]:
    legend = 1 + (contents.phases > 4)
    return (
        Item("chart", 4, 10, 3, grows=True),
        # With headings there is the headline, which has it.
        *(() if title else (Item("throughput", 1, contents.units, 4),)),
        Item("phases", 2, 1 + legend + title, 2),
        _heat(contents, title, 1),
        Item("spread", contents.spread, contents.spread, 4),
        Item("communication", *_traffic_lines(contents, title), 5),
        Item("ranks", title + 1 + min(4, contents.ranks), title + 1 + contents.ranks, 6),
        Item("events", title + 1, title + min(8, max(1, contents.events)), 7, grows=True),
    )


def _traffic_lines(contents: Contents, title: int) -> tuple[int, int]:
    """Return the least lines of the communication, and those that show all of it."""
    head = title + 1
    least = min(3 if title else 1, max(1, contents.traffic))
    return head + least, head + max(1, contents.traffic)


def _wide(body: Region, contents: Contents, title: int, *, is_very_wide: bool) -> Plan:
    """Figures of the job above, those of its parts below."""
    beside = 2 * title + 1 + contents.phases + contents.units
    heat = title + contents.heat + contents.spread
    ranks = title + 1 + contents.ranks
    least_traffic, traffic = _traffic_lines(contents, title)
    events = title + min(12, max(1, contents.events))
    few_events = min(events, title + FEW_EVENTS)
    if is_very_wide:
        below = max(heat + ranks, traffic + events)
        below_least = max(heat, traffic + few_events)
    else:
        below = max(heat, few_events) + traffic + ranks
        below_least = max(heat, few_events) + least_traffic
    # The panels beside the chart are shown whole if the lists below can make room for them.
    upper = max(body.height - below, min(beside, body.height - below_least))
    upper = min(max(upper, min(beside, 9, body.height // 2)), body.height)
    above, lower = body.split_off_top(upper)
    plan = _upper(above, contents, title, is_very_wide=is_very_wide)
    heat_item = _heat(contents, title, 1)
    ranks_item = Item("ranks", title + 1 + min(2, contents.ranks), ranks, 3)
    spread_item = Item("spread", contents.spread, contents.spread, 2)
    traffic_item = Item("communication", least_traffic, traffic, 2)
    events_item = Item("events", title + 1, events, 3, grows=True)
    if is_very_wide:
        left, right = lower.split(55)
        plan |= stack(left, (heat_item, spread_item, ranks_item._replace(grows=True)))
        plan |= stack(right, (traffic_item, events_item))
        return plan
    pair, rest = lower.split_off_top(max(heat, few_events))
    rows = stack(rest, (traffic_item, ranks_item))
    # The events, beside the ranks, take the room that the tables leave.
    spare = rest.height - sum(region.height for region in rows.values())
    pair, rest = lower.split_off_top(pair.height + spare)
    left, right = pair.split(50)
    plan |= stack(left, (heat_item, spread_item))
    plan |= stack(right, (events_item,))
    return plan | stack(rest, (traffic_item, ranks_item))


def _upper(above: Region, contents: Contents, title: int, *, is_very_wide: bool) -> Plan:
    chart, side = above.split(60)
    metrics_item = Item("metrics", title + 1, title + contents.metrics, 3)
    charts = [Item("chart", 3, 3, 1, grows=True)]
    if contents.curves > 1 and chart.height >= TWO_CHARTS_FROM_HEIGHT:
        charts.append(Item("next chart", 3, 3, 2, grows=True))
    plan = stack(chart, charts)
    if is_very_wide:
        side, metrics = side.split(62)
        plan |= stack(metrics, (metrics_item,))
    phases = Item("phases", 1, title + 1 + contents.phases, 1)
    throughput = Item("throughput", 1, title + contents.units, 2)
    # The chart's heading already has the metric's value; the others may use the blank room.
    is_tall = side.height >= phases.ideal + throughput.ideal + title + 2
    rest = (metrics_item,) if is_tall and not is_very_wide else ()
    return plan | stack(side, (phases, throughput, *rest))


def _neighbour(
    state: State, _width: int, _height: int, rank: int | None, across: int, down: int, **_: object
) -> int | None:
    return neighbour(state.job, rank, across, down)


class OverviewPage(Page):
    """The first screen of a job."""

    tab = Tab("overview", "Overview", key="1")
    help = PageHelp(
        about="overview: what the job achieves, where its time goes, what holds it back",
        keys=(
            ("m M", "next, previous metric in the chart"),
            ("L", "logarithmic axis of the chart, and back"),
            ("f F", "next, previous figure of the ranks"),
            ("arrows", "choose a rank; enter shows it in full"),
        ),
        terms=(
            ("step time", "mean of the last 20 steps over all ranks; communication is"),
            ("", "only the part that no computation hides"),
            ("MFU", "model FLOPs a second, as a share of what the devices can do"),
            *TRAFFIC_TERMS,
        ),
    )
    tables = (RANKS,)
    keys = (("m", "metric"), ("L", "log axis"), ("f", "heat map"), ("enter", "one rank"))
    rank_map = RankMap("heat", rank_at, _neighbour)

    @override
    def panels(self, scene: Scene, body: Region) -> list[Panel]:
        """Place the panels, the most important ones where the room is short."""
        plan = plan_overview(scene.width, body, _contents(scene, body), title=scene.title)
        return place(plan, _draws(scene))


def _contents(scene: Scene, body: Region) -> Contents:
    state, look = scene.state, scene.look
    split = phase_split(state.job)
    return Contents(
        says=diagnosis_lines(state, body.width, look),
        units=len(draw_throughput(state, body.width, body.height, look)) - scene.title,
        phases=len(split.phases) if split is not None else 1,
        metrics=len(newest_metrics(state)),
        curves=len(metric_names(state)),
        heat=heatmap_lines(state, body.width, look, figure=chosen_heat(scene.view)) - scene.title,
        spread=len(draw_spread(state, body.width, look)),
        ranks=len(state.job.ranks),
        traffic=len(traffic_rows(state.job)) + (state.job.communication_note is not None),
        events=len(timeline(state)),
    )


def _draws(scene: Scene) -> dict[str, Draw]:
    state, view, look = scene.state, scene.view, scene.look
    chart = partial(draw_chart, state, look=look, view=view)
    return {
        "says": partial(draw_diagnosis, state, look=look),
        "chart": partial(chart, metric=chosen_metric(state, view)),
        "next chart": partial(chart, metric=chosen_metric(state, view, later=1)),
        "phases": partial(draw_phases, state, look=look),
        "throughput": partial(draw_throughput, state, look=look),
        "metrics": partial(draw_metrics, state, look=look, selected=chosen_metric(state, view)),
        "heat": partial(
            draw_heatmap, state, look=look, figure=chosen_heat(view), selected=view.rank
        ),
        "spread": lambda width, _: draw_spread(state, width, look),
        "ranks": table_draw(RANKS, scene),
        "communication": partial(draw_communication, state, look=look),
        "events": partial(draw_events, state, look=look),
    }


PAGE: Final[Page] = OverviewPage()
