"""Logged metrics: a line chart of one, and the newest value of each.

The chart is drawn in Braille dots, two by four per cell, or in ASCII, one by two.

Charts of the run side by side: what is logged, and what each step costs.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from boltmesh.tui import units
from boltmesh.tui.render.line import Line, Role, fit
from boltmesh.tui.render.style import Style, heading, spread
from boltmesh.tui.state import Series, State, metric_names
from boltmesh.tui.view import View

_BRAILLE_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_ASCII_DOTS = " '.:"
AXIS_FROM_HEIGHT = 6
MAX_VALUE = 1e300
"""Larger values, infinities and NaN are not drawn: the range itself must remain a number."""


class Scale(msgspec.Struct, frozen=True):
    """A range of values, and the round numbers within it."""

    low: float
    high: float
    step: float
    """The distance of the ticks; a narrow range may hold only one of them."""
    ticks: tuple[float, ...]


def chosen_metric(state: State, view: View, *, later: int = 0) -> str | None:
    """Return the metric that the chart shows, or the one ``later`` places after it."""
    names = metric_names(state)
    if not names:
        return None
    place = names.index(view.metric) if view.metric in names else 0
    return names[(place + later) % len(names)]


def draw_chart(
    state: State,
    width: int,
    height: int,
    look: Style,
    *,
    metric: str | None = None,
    is_log: bool = False,
    view: View | None = None,
) -> list[Line]:
    """One metric over the steps, under a heading with its newest value.

    On a logarithmic axis there is no place for values of zero and below; where that leaves
    nothing, the axis stays linear and the heading says so.
    """
    names = metric_names(state)
    name = metric if metric in names else (names[0] if names else None)
    if name is None:
        return [heading("loss", width, look), Line("nothing logged yet", "muted").crop(width)][
            :height
        ]
    view = view or View()
    series = seen_through(state.series[name], view)
    value = Line(units.number(series.values[-1]), "strong")
    if words := view_words(view):
        value = Line(words, "muted").add("  ").join(value)
    if len(names) > 1:
        value = Line(f"{names.index(name) + 1} of {len(names)}", "muted").add("  ").join(value)
    if is_log:
        is_log = any(0 < point <= MAX_VALUE for point in series.values)
        word = "log" if is_log else "no log axis: nothing above zero"
        value = Line(word, "muted").add("  ").join(value)
    has_axis = height >= AXIS_FROM_HEIGHT
    plot = plot_series(series, width, height - 1 - has_axis, look, is_log=is_log)
    lines = [heading(name, width, look, right=value), *plot]
    if has_axis and plot:
        first = Line(f"step {units.count(series.steps[0])}", "muted")
        last = Line(units.count(series.steps[-1]), "muted")
        lines.append(spread(first, last, width))
    return lines[:height]


SMOOTH = 0.9
"""Weight of the past in a moving mean."""


def seen_through(series: Series, view: View) -> Series:
    """Return what is shown of a series: its newest steps, and their moving mean if it is wanted."""
    steps, values = series.steps, series.values
    if view.zoom and steps:
        first = steps[-1] - (steps[-1] - steps[0]) / 2**view.zoom
        begin = bisect_left(steps, first)
        steps, values = steps[begin:], values[begin:]
    if view.is_smooth:
        mean = math.nan
        means = []
        for value in values:
            if math.isfinite(value):
                mean = value if math.isnan(mean) else SMOOTH * mean + (1 - SMOOTH) * value
            means.append(mean if math.isfinite(value) else value)
        values = tuple(means)
    return Series(steps, values)


def view_words(view: View) -> str:
    """Return how charts are looked at, where that is not the usual way."""
    words = [f"newest 1/{2**view.zoom}"] if view.zoom else []
    return "  ".join([*words, *(["smooth"] if view.is_smooth else [])])


def draw_plot(
    title: str,
    series: Series,
    width: int,
    height: int,
    look: Style,
    *,
    newest: str,
    about: str = "",
    beside: Series | None = None,
    is_log: bool = False,
) -> list[Line]:
    """A chart with its newest value, and a second series in another colour on the same axes."""
    if beside is not None and not beside.steps:
        beside = None
    has_axis = height >= AXIS_FROM_HEIGHT
    plot = plot_series(series, width, height - 1 - has_axis, look, is_log=is_log, beside=beside)
    lines = [heading(title, width, look, right=Line(newest, "strong")), *plot]
    if has_axis and plot:
        first = Line(f"step {units.count(series.steps[0])}", "muted")
        last = Line(about, "accent").add("  " if about else "")
        lines.append(spread(first, last.add(units.count(series.steps[-1]), "muted"), width))
    return lines[:height]


def plot_series(
    series: Series,
    width: int,
    height: int,
    look: Style,
    *,
    is_log: bool = False,
    beside: Series | None = None,
) -> list[Line]:
    """Return ``height`` lines: labels of the scale at the left, the curve beside them.

    ``beside`` is drawn over it in another colour, on the same axes.
    """
    points = _points(series, is_log=is_log)
    over = [] if beside is None else _points(beside, is_log=is_log)
    if not points or height < 1:
        return [Line("no finite value", "warn").crop(width)][:height]
    values = [value for _, value in (*points, *over)]
    ticks = max(2, height // 3)
    scale = (log_scale if is_log else nice_scale)(min(values), max(values), ticks=ticks)
    labels = _labels(scale, height, is_log=is_log)
    label_width = max(len(label) for label in labels)
    plot_width = width - label_width - 1
    if plot_width < 4:
        label_width, plot_width, labels = -1, width, [""] * height
    steps = [step for step, _ in (*points, *over)]
    span = (min(steps), max(steps))
    is_ascii = look.glyphs.is_ascii
    rows = _rasterise(points, scale, plot_width, height, span, is_ascii=is_ascii)
    second = [" " * plot_width] * height
    if over:
        second = _rasterise(over, scale, plot_width, height, span, is_ascii=is_ascii)
    lines = []
    for label, row, other in zip(labels, rows, second, strict=True):
        line = Line(label.rjust(label_width), "muted").add(" " if label_width >= 0 else "")
        for is_over, cells in groupby(
            zip(row, other, strict=True), key=lambda pair: pair[1] != " "
        ):
            text = "".join(top if is_over else below for below, top in cells)
            line.add(text, "warn" if is_over else "chart")
        lines.append(line.crop(width))
    return lines


def _points(series: Series, *, is_log: bool) -> list[tuple[int, float]]:
    return [
        (step, math.log10(value) if is_log else value)
        for step, value in zip(series.steps, series.values, strict=True)
        if abs(value) <= MAX_VALUE and (value > 0 or not is_log)
    ]


def nice_scale(low: float, high: float, *, ticks: int) -> Scale:
    """Return a range with about ``ticks`` round numbers: multiples of 1, 2 or 5 x 10^n."""
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-300):
        # All values are the same: any range around them will do.
        margin = abs(high) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / max(1, ticks)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(
        (factor * magnitude for factor in (1, 2, 5) if factor * magnitude >= rough),
        10 * magnitude,
    )
    first, last = math.ceil(low / step), math.floor(high / step)
    return Scale(
        low=low, high=high, step=step, ticks=tuple(step * n for n in range(first, last + 1))
    )


def log_scale(low: float, high: float, *, ticks: int) -> Scale:
    """Return a range of exponents; the ticks are powers of ten, or 1, 2 and 5 between them.

    Less than one such tick in the range leaves its two ends.
    """
    if not high - low > 1e-9:
        low, high = low - 0.05, high + 0.05
    for factors in ((1,), (1, 2, 5), tuple(range(1, 10))):
        found = [
            exponent + math.log10(factor)
            for exponent in range(math.floor(low), math.ceil(high) + 1)
            for factor in factors
            if low <= exponent + math.log10(factor) <= high
        ]
        if len(found) >= 2:
            break
    else:
        found = [low, high]
    every = -(-len(found) // max(2, ticks))
    return Scale(low=low, high=high, step=high - low, ticks=tuple(found[::every]))


def _labels(scale: Scale, height: int, *, is_log: bool) -> list[str]:
    """Return a label, or nothing, for each line; the top of the scale is the first line."""
    labels = [""] * height
    for tick in scale.ticks:
        place = round((scale.high - tick) / (scale.high - scale.low) * (height - 1))
        labels[place] = f"{10.0**tick:.3g}" if is_log else _label(tick, scale.step)
    return labels


def _label(value: float, step: float) -> str:
    """Return ``value`` with just the decimals that tell it from its neighbour."""
    size = max(abs(value), step)
    if size >= 1e5 or step < 1e-4:
        return f"{value:.2g}" if value else "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}"


def _rasterise(
    points: Sequence[tuple[int, float]],
    scale: Scale,
    width: int,
    height: int,
    span: tuple[int, int],
    *,
    is_ascii: bool,
) -> list[str]:
    across, down = (1, 2) if is_ascii else (2, 4)
    columns, rows = width * across, height * down
    first, last = span
    dots = [[False] * columns for _ in range(rows)]
    before: tuple[int, int] | None = None
    for x, entry, lowest, highest, leave in _by_column(points, first, last, columns):
        y_entry, y_low, y_high, y_leave = (
            _row_of(value, scale, rows) for value in (entry, lowest, highest, leave)
        )
        for y in range(y_high, y_low + 1):
            dots[y][x] = True
        if before is not None:
            _connect(dots, before, (x, y_entry))
        before = (x, y_leave)
    return [
        "".join(
            _cell(dots, column * across, row * down, is_ascii=is_ascii) for column in range(width)
        )
        for row in range(height)
    ]


def _by_column(
    points: Sequence[tuple[int, float]], first: int, last: int, columns: int
) -> list[tuple[int, float, float, float, float]]:
    """Return (column, first, lowest, highest, last value) for each column that has points."""
    found: list[tuple[int, float, float, float, float]] = []
    for step, value in points:
        x = round((step - first) / (last - first) * (columns - 1)) if last > first else 0
        if found and found[-1][0] == x:
            _, entry, lowest, highest, _ = found[-1]
            found[-1] = (x, entry, min(lowest, value), max(highest, value), value)
        else:
            found.append((x, value, value, value, value))
    return found


def _row_of(value: float, scale: Scale, rows: int) -> int:
    return round((scale.high - value) / (scale.high - scale.low) * (rows - 1))


def _connect(dots: list[list[bool]], start: tuple[int, int], end: tuple[int, int]) -> None:
    """Draw a straight line between two dots, gapless."""
    (x0, y0), (x1, y1) = start, end
    length = max(abs(x1 - x0), abs(y1 - y0), 1)
    for place in range(length + 1):
        x = x0 + round((x1 - x0) * place / length)
        y = y0 + round((y1 - y0) * place / length)
        dots[y][x] = True


def _cell(dots: list[list[bool]], x: int, y: int, *, is_ascii: bool) -> str:
    if is_ascii:
        return _ASCII_DOTS[dots[y][x] + 2 * dots[y + 1][x]]
    bits = sum(
        bit
        for across, column in enumerate(_BRAILLE_DOTS)
        for down, bit in enumerate(column)
        if dots[y + down][x + across]
    )
    return chr(0x2800 + bits) if bits else " "


def draw_metrics(
    state: State, width: int, height: int, look: Style, *, selected: str | None = None
) -> list[Line]:
    """Names at the left, values at the right, a mark at the one that the chart shows."""
    lines = [heading("metrics", width, look)] if look.has_headings else []
    values = newest_metrics(state)
    for name, value in values.items():
        mark = look.glyphs.cursor if name == selected else " "
        figure = Line(units.number(value))
        label = fit(name, max(0, width - figure.width - 3), ellipsis=look.glyphs.ellipsis)
        role: Role = "text" if name == selected else "muted"
        lines.append(spread(Line(f"{mark} ", "accent").add(label, role), figure, width))
    if not values:
        lines.append(Line("nothing logged yet", "muted").crop(width))
    return lines[:height]


def newest_metrics(state: State) -> dict[str, float]:
    """Return the last value of each metric, those with a curve first and the loss before all."""
    values = {name: state.series[name].values[-1] for name in metric_names(state)}
    return values | {name: state.job.metrics[name] for name in sorted(state.job.metrics)}


LEAST_HEIGHT = 7
"""Lines of a chart with its axis."""
LEAST_WIDTH = 38
GAP = 2

TRENDS = (
    ("step_s", "step time, ms", 1e3),
    ("tokens_per_s", "tokens/s", 1.0),
    ("memory_bytes", "memory of rank 0, GiB", 2.0**-30),
    ("utilisation_percent", "utilisation, %", 1.0),
    ("power_watts", "power of a GPU, W", 1.0),
    ("temperature_celsius", "hottest GPU, C", 1.0),
)
"""Name, title and factor."""


class Chart(NamedTuple):
    """One chart, perhaps with a second series on the same axes."""

    title: str
    series: Series
    beside: Series | None = None
    has_units: bool = False
    """Whether the title names the unit; the newest value is then rounded."""


def charts(state: State) -> list[Chart]:
    """Return the loss, with the validation loss over it, the trends, and the other metrics."""
    found = list(_charts(state))
    return sorted(found, key=lambda chart: len(chart.series.steps) < 2)


def _charts(state: State) -> Iterator[Chart]:
    names = metric_names(state)
    validation = next((name for name in ("val_loss", "val/loss", "loss/val") if name in names), "")
    if "loss" in names:
        title = f"loss, {validation}" if validation else "loss"
        yield Chart(title, state.series["loss"], state.series.get(validation))
    for name, _, _ in TRENDS:
        if name in state.trends:
            yield _trend(state, name)
    for name in names:
        if name not in {"loss", validation}:
            yield Chart(name, state.series[name])


def _trend(state: State, name: str) -> Chart:
    _, title, factor = next(trend for trend in TRENDS if trend[0] == name)
    series = state.trends[name]
    values = tuple(factor * value for value in series.values)
    return Chart(title, Series(series.steps, values), has_units=True)


def draw_trends(
    state: State, width: int, height: int, look: Style, *, view: View, names: Sequence[str]
) -> list[Line]:
    """The trends of these names, those that have more than one point."""
    found = [
        _trend(state, name)
        for name in names
        if name in state.trends and len(state.trends[name].steps) > 1
    ]
    return _grid(found, width, height, look, view)


def draw_history(state: State, width: int, height: int, look: Style, *, view: View) -> list[Line]:
    """As many charts as fit, in columns and rows of equal size."""
    return _grid(charts(state), width, height, look, view)


def _grid(found: Sequence[Chart], width: int, height: int, look: Style, view: View) -> list[Line]:
    if not found or height < 2 or width < 1:
        return []
    across = max(1, min(len(found), (width + GAP) // (LEAST_WIDTH + GAP), 4))
    down = max(1, min(-(-len(found) // across), height // LEAST_HEIGHT))
    # No column stays empty where fewer would show as many.
    across = min(across, -(-len(found) // down))
    cell = (width - GAP * (across - 1)) // across
    lines: list[Line] = []
    for row in range(down):
        room = height // down + (height % down if row == down - 1 else 0)
        drawn = [_draw(chart, cell, room, look, view) for chart in found[row * across :][:across]]
        for at in range(room):
            line = Line()
            for column, each in enumerate(drawn):
                line.pad_to(column * (cell + GAP))
                line.join(each[at] if at < len(each) else Line())
            lines.append(line)
    return lines


def _draw(chart: Chart, width: int, height: int, look: Style, view: View) -> list[Line]:
    value = chart.series.values[-1]
    newest = units.rate(value) if chart.has_units else units.number(value)
    return draw_plot(
        chart.title,
        seen_through(chart.series, view),
        width,
        height,
        look,
        newest=newest,
        about=view_words(view),
        beside=None if chart.beside is None else seen_through(chart.beside, view),
        is_log=view.is_log and any(value > 0 for value in chart.series.values),
    )
