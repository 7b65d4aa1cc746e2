"""Charts of the run side by side: logged metrics, the costs of each step, and a second run."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from boltmesh.tui import units
from boltmesh.tui.panels.chart import Curve, draw_plot, x_at
from boltmesh.tui.panels.window import Window, seen_through, value_at, view_words, window_of
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, heading
from boltmesh.tui.state import Series, State, metric_names
from boltmesh.tui.view import View

LEAST_HEIGHT = 7
"""Lines of a chart with its axis."""
LEAST_WIDTH = 38
GAP = 2

TRENDS = (
    ("step_s", "step time, ms", 1e3),
    ("tokens_per_s", "tokens/s", 1.0),
    ("bubble_ratio", "bubble, %", 1e2),
    ("bytes_per_s", "traffic of rank 0, B/s", 1.0),
    ("loader_queue", "batches ready in the loader of rank 0", 1.0),
    ("memory_bytes", "memory of rank 0, GiB", 2.0**-30),
    ("utilisation_percent", "utilisation of rank 0, %", 1.0),
    ("power_watts", "power of rank 0, W", 1.0),
    ("temperature_celsius", "temperature of rank 0, C", 1.0),
)
"""Name, title and factor."""
CLOCK = "wall_s"
TREND_SPAN = 0.2
"""Least range of a trend, as a share of its largest value: noise does not fill the chart."""


class Chart(NamedTuple):
    """One chart, perhaps with a second series and that of another run on the same axes."""

    name: str
    title: str
    series: Series
    beside: Series | None = None
    write: Callable[[float | None], str] = units.number
    """Writes a value."""
    least_span: float = 0.0
    """The least range of its values, as a share of the largest."""
    other: Series | None = None
    """The same of the other run."""
    beside_name: str = ""

    @property
    def shown(self) -> list[Series]:
        """All of its series."""
        return [each for each in (self.series, self.beside, self.other) if each is not None]


def charts(state: State, *, is_time: bool = False) -> list[Chart]:
    """Return the loss, with the validation loss over it, the trends, and the other metrics.

    Args:
        state: With the other run, if there is one.
        is_time: The axis has seconds since a job began instead of steps.
    """
    other = state.other
    others = {} if other is None else {chart.name: chart.series for chart in _charts(other)}
    found = []
    for chart in _charts(state):
        theirs = others.get(chart.name)
        if is_time:
            series = _timed(chart.series, state)
            if series is None:
                continue
            theirs = None if theirs is None or other is None else _timed(theirs, other)
            beside = None if chart.beside is None else _timed(chart.beside, state)
            chart = chart._replace(series=series, beside=beside)  # noqa: PLW2901
        found.append(chart._replace(other=theirs))
    return sorted(found, key=lambda chart: len(chart.series.steps) < 2)


def has_clock(state: State) -> bool:
    """Say whether it is known when the steps were."""
    clock = state.trends.get(CLOCK)
    return clock is not None and len(clock.steps) > 1


def _timed(series: Series, state: State) -> Series | None:
    """Return a series over seconds since the job began; None where that is not known."""
    clock = state.trends.get(CLOCK)
    if clock is None or len(clock.steps) < 2:
        return None
    # A clock that was set back while the job ran lets time stand still.
    clock = Series(clock.steps, tuple(accumulate(clock.values, max)))
    return Series(
        tuple(_clock_at(clock, step) - state.job.started for step in series.steps), series.values
    )


def _clock_at(clock: Series, step: float) -> float:
    """Return the time of a step between two that are known, or beyond them at the same pace."""
    after = min(max(1, bisect_left(clock.steps, step)), len(clock.steps) - 1)
    first, last = clock.steps[after - 1], clock.steps[after]
    begin, end = clock.values[after - 1], clock.values[after]
    return begin + (end - begin) * (step - first) / (last - first)


def _charts(state: State) -> Iterator[Chart]:
    names = metric_names(state)
    validation = next((name for name in ("val_loss", "val/loss", "loss/val") if name in names), "")
    if "loss" in names:
        beside = state.series.get(validation)
        yield Chart("loss", "loss", state.series["loss"], beside, beside_name=validation)
    for name, _, _ in TRENDS:
        if name in state.trends:
            yield _trend(state, name)
    for name in names:
        is_trend = name.rpartition("/")[2] == "bubble_ratio" and "bubble_ratio" in state.trends
        if name not in {"loss", validation} and not is_trend:
            yield Chart(name, name, state.series[name])


def _trend(state: State, name: str) -> Chart:
    _, title, factor = next(trend for trend in TRENDS if trend[0] == name)
    series = state.trends[name]
    values = tuple(factor * value for value in series.values)
    write = units.bandwidth if name == "bytes_per_s" else units.rate
    series = Series(series.steps, values)
    return Chart(name, title, series, write=write, least_span=TREND_SPAN)


def draw_trends(
    state: State, width: int, height: int, look: Style, *, view: View, names: Sequence[str]
) -> list[Line]:
    """The trends of these names over the steps, those that have more than one point."""
    view = msgspec.structs.replace(view, pan=None, cursor=None, is_time=False, chart_row=0)
    found = [
        _trend(state, name)
        for name in names
        if name in state.trends and len(state.trends[name].steps) > 1
    ]
    return _grid(found, width, height, look, view)


def has_trends(state: State, names: Iterable[str]) -> bool:
    """Say whether ``draw_trends`` has a curve to draw."""
    return any(name in state.trends and len(state.trends[name].steps) > 1 for name in names)


def draw_history(state: State, width: int, height: int, look: Style, *, view: View) -> list[Line]:
    """As many charts as fit, in columns and rows of equal size."""
    found = charts(state, is_time=view.is_time)
    grid = _fit(found, width, height)
    if grid is None or (grid.first(view) == 0 and grid.num_shown >= len(found)):
        return _grid(found, width, height, look, view)
    grid = _fit(found, width, height - 1) or grid
    first = grid.first(view)
    last = min(first + grid.num_shown, len(found))
    right = Line(f"{first + 1}-{last} of {len(found)}", "muted")
    return [
        heading("charts", width, look, right=right),
        *_grid(found, width, height - 1, look, view),
    ]


class _Grid(NamedTuple):
    """How charts are laid out."""

    num_charts: int
    across: int
    down: int
    cell: int
    """Cells across of a chart."""

    @property
    def num_shown(self) -> int:
        return self.across * self.down

    def first(self, view: View) -> int:
        """Return the first chart that is shown, at the begin of a row."""
        rows = -(-self.num_charts // self.across)
        return min(max(0, view.chart_row), max(0, rows - self.down)) * self.across


def _fit(found: Sequence[Chart], width: int, height: int) -> _Grid | None:
    if not found or height < 2 or width < 1:
        return None
    across = max(1, min(len(found), (width + GAP) // (LEAST_WIDTH + GAP), 4))
    down = max(1, min(-(-len(found) // across), height // LEAST_HEIGHT))
    # No column stays empty where fewer would show as many.
    across = min(across, -(-len(found) // down))
    return _Grid(len(found), across, down, (width - GAP * (across - 1)) // across)


def _grid(found: Sequence[Chart], width: int, height: int, look: Style, view: View) -> list[Line]:
    grid = _fit(found, width, height)
    if grid is None:
        return []
    window = window_of((each for chart in found for each in chart.shown), view)
    lines: list[Line] = []
    for row in range(grid.down):
        room = _room(height, grid.down, row)
        begin = grid.first(view) + row * grid.across
        drawn = [
            _draw(chart, grid.cell, room, look, view, window)
            for chart in found[begin:][: grid.across]
        ]
        for at in range(room):
            line = Line()
            for column, each in enumerate(drawn):
                line.pad_to(column * (grid.cell + GAP))
                line.join(each[at] if at < len(each) else Line())
            lines.append(line)
    return lines


def _room(height: int, down: int, row: int) -> int:
    """Return the lines of a row of charts."""
    return height // down + (height % down if row == down - 1 else 0)


def history_window(state: State, view: View) -> Window:
    """Return the steps, or seconds, that the charts of the run show."""
    found = charts(state, is_time=view.is_time)
    return window_of((each for chart in found for each in chart.shown), view)


def cursor_at(state: State, width: int, height: int, view: View, x: int, y: int) -> float | None:
    """Return the step, or second, of a cell of ``draw_history``; None: there is no curve."""
    found = charts(state, is_time=view.is_time)
    grid = _fit(found, width, height)
    if grid is not None and (grid.first(view) or grid.num_shown < len(found)):
        y, height = y - 1, height - 1
        grid = _fit(found, width, height)
    if grid is None or y < 0:
        return None
    row = min(y // max(1, height // grid.down), grid.down - 1)
    column = x // (grid.cell + GAP)
    place = grid.first(view) + row * grid.across + column
    if column >= grid.across or place >= len(found):
        return None
    chart, window = found[place], history_window(state, view)
    shown = [seen_through(each, view, window) for each in chart.shown]
    room = _room(height, grid.down, row) - 2
    return x_at(
        shown,
        grid.cell,
        room,
        x - column * (grid.cell + GAP),
        window,
        is_log=_is_log(chart, view),
        least_span=chart.least_span,
    )


def _is_log(chart: Chart, view: View) -> bool:
    return view.is_log and any(value > 0 for value in chart.series.values)


def _draw(
    chart: Chart, width: int, height: int, look: Style, view: View, window: Window
) -> list[Line]:
    # With two curves or more, names and values have the colours of theirs.
    is_alone = chart.beside is None and chart.other is None
    title = Line(chart.title, "strong" if is_alone else "chart")
    curves = [Curve(chart.series, "strong" if is_alone else "chart")]
    if chart.beside is not None:
        title.add(", ", "muted").add(chart.beside_name, "warn")
        curves.append(Curve(chart.beside, "warn"))
    if chart.other is not None:
        curves.append(Curve(chart.other, "optimizer", is_dashed=True))
    newest = Line()
    for curve in curves:
        values = curve.series.values
        if view.cursor is not None:
            value = value_at(curve.series, view.cursor)
        elif curve.series is chart.beside:
            continue
        else:
            value = values[-1] if values else None
        newest.add(" / " if newest.width else "", "muted").add(chart.write(value), curve.role)
    over = [each._replace(series=seen_through(each.series, view, window)) for each in curves[1:]]
    return draw_plot(
        title,
        seen_through(chart.series, view, window),
        width,
        height,
        look,
        newest=newest,
        about=view_words(view),
        over=over,
        is_log=_is_log(chart, view),
        window=window,
        cursor=view.cursor,
        is_time=view.is_time,
        least_span=chart.least_span,
    )
