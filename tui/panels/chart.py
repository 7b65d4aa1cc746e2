"""Logged metrics: a line chart of one, and the newest value of each.

The chart is drawn in Braille dots, two by four per cell, or in ASCII, one by two.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from boltmesh.tui import units
from boltmesh.tui.panels.window import Window, seen_through, view_words, window_of
from boltmesh.tui.render.line import Line, Role, fit
from boltmesh.tui.render.style import Style, heading, spread
from boltmesh.tui.state import Series, State, metric_names
from boltmesh.tui.view import View

_BRAILLE_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of each dot in a character, by column and row."""
_BRAILLE_SIGNS = [" ", *map(chr, range(0x2801, 0x2900))]
_ASCII_BITS = ((1, 2),)
_ASCII_SIGNS = " '.:"
AXIS_FROM_HEIGHT = 6
MAX_VALUE = 1e300
"""Larger values, infinities and NaN are not drawn: the range itself must remain a number."""


class Scale(msgspec.Struct, frozen=True):
    """A range of values, and the round numbers within it."""

    low: float
    high: float
    step: float
    """The distance of the ticks."""
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
    view = msgspec.structs.replace(view or View(), pan=None)
    series = seen_through(state.series[name], view)
    value = Line(units.number(series.values[-1]), "strong")
    if words := view_words(view):
        value = Line(words, "muted").add("  ").join(value)
    if len(names) > 1:
        value = Line(f"{names.index(name) + 1} of {len(names)}", "muted").add("  ").join(value)
    is_log = view.is_log and any(0 < point <= MAX_VALUE for point in series.values)
    if view.is_log:
        word = "log" if is_log else "no log axis: nothing above zero"
        value = Line(word, "muted").add("  ").join(value)
    has_axis = height >= AXIS_FROM_HEIGHT
    plot = plot_series(series, width, height - 1 - has_axis, look, is_log=is_log)
    lines = [heading(Line(name, "strong"), width, look, right=value), *plot.lines]
    if has_axis and plot.lines:
        lines.append(_axis_line(window_of([series], View()), width, plot.start))
    return lines[:height]


def x_words(x: float, *, is_time: bool) -> str:
    """Return a place on the axis."""
    return units.duration(x) if is_time else units.count(round(x))


class Curve(NamedTuple):
    """A series that is drawn over another one, in a colour of its own."""

    series: Series
    role: Role
    is_dashed: bool = False


def draw_plot(
    title: Line,
    series: Series,
    width: int,
    height: int,
    look: Style,
    *,
    newest: Line,
    about: str = "",
    over: Sequence[Curve] = (),
    is_log: bool = False,
    window: Window | None = None,
    cursor: float | None = None,
    is_time: bool = False,
    least_span: float = 0.0,
) -> list[Line]:
    """A chart with its newest value or that at the cursor, and other series on the same axes.

    ``least_span`` is the least range of the values, as a share of the largest.
    """
    over = [curve for curve in over if curve.series.steps]
    if window is None:
        window = window_of([series, *(curve.series for curve in over)], View())
    has_axis = height >= AXIS_FROM_HEIGHT
    plot = plot_series(
        series,
        width,
        height - 1 - has_axis,
        look,
        is_log=is_log,
        over=over,
        window=window,
        cursor=cursor,
        least_span=least_span,
    )
    lines = [heading(title, width, look, right=newest), *plot.lines]
    if has_axis and plot.lines:
        if cursor is not None:
            about = f"at {'' if is_time else 'step '}{x_words(cursor, is_time=is_time)}"
        lines.append(_axis_line(window, width, plot.start, is_time=is_time, about=about))
    return lines[:height]


X_LABEL_EVERY = 20
"""Cells of the plot for each label of its lower axis, at most."""


def _axis_line(
    window: Window, width: int, start: int, *, is_time: bool = False, about: str = ""
) -> Line:
    """Both ends of the window, and round numbers between them where there is room.

    ``start`` is the plot's first cell; ``about`` comes before the last number.
    """
    first, last = window
    line = Line(("" if is_time else "step ") + x_words(first, is_time=is_time), "muted")
    end = Line(about, "accent").add("  " if about else "")
    end.add(x_words(last, is_time=is_time), "muted")
    plot_width = width - start
    unit = next(each for each in (3600, 60, 1) if each == 1 or (is_time and last > 3 * each))
    scale = nice_scale(first / unit, last / unit, ticks=plot_width // X_LABEL_EVERY)
    for tick in scale.ticks if last > first else ():
        text = x_words(tick * unit, is_time=is_time)
        at = start + round((tick * unit - first) / (last - first) * (plot_width - 1))
        at -= len(text) // 2
        if (is_time or tick == round(tick)) and (
            line.width + 2 <= at and at + len(text) + 2 <= width - end.width
        ):
            line.pad_to(at).add(text, "muted")
    return spread(line, end, width)


class _Axes(NamedTuple):
    scale: Scale
    labels: list[str]
    label_width: int
    """-1: there is no room for labels."""
    plot_width: int


def _axes(
    values: Sequence[float], width: int, height: int, *, is_log: bool, least_span: float = 0.0
) -> _Axes:
    ticks = max(2, height // 3)
    low, high = min(values), max(values)
    least = math.log10(1 + least_span) if is_log else least_span * max(abs(low), abs(high))
    missing = least - (high - low)
    if missing > 0:
        low, high = low - missing / 2, high + missing / 2
    scale = (log_scale if is_log else nice_scale)(low, high, ticks=ticks)
    labels = _labels(scale, height, is_log=is_log)
    label_width = max(len(label) for label in labels)
    plot_width = width - label_width - 1
    if plot_width < 4:
        return _Axes(scale, [""] * height, -1, width)
    return _Axes(scale, labels, label_width, plot_width)


class Plot(NamedTuple):
    """A curve with the labels of its values, without heading and lower axis."""

    lines: list[Line]
    start: int
    """The first cell beside the labels."""


GRID_EVERY = 4
"""Cells between the dots of a line of the grid."""


def plot_series(
    series: Series,
    width: int,
    height: int,
    look: Style,
    *,
    is_log: bool = False,
    over: Sequence[Curve] = (),
    window: Window | None = None,
    cursor: float | None = None,
    least_span: float = 0.0,
) -> Plot:
    """Return ``height`` lines: labels of the scale at the left, the curve beside them.

    Behind it are a grid at the labels and the cursor; ``over`` is drawn on top.
    """
    curves = [Curve(series, "chart"), *over]
    points = [_points(curve.series, is_log=is_log) for curve in curves]
    values = [value for each in points for _, value in each]
    if not values or height < 1:
        return Plot([Line("no finite value", "warn").crop(width)][:height], 0)
    axes = _axes(values, width, height, is_log=is_log, least_span=least_span)
    if window is None:
        steps = [step for each in points for step, _ in each]
        window = min(steps), max(steps)
    cells = _background(axes, height, window, cursor, look)
    for curve, each in zip(curves, points, strict=True):
        rows = _rasterise(
            each, axes.scale, axes.plot_width, height, window, is_ascii=look.glyphs.is_ascii
        )
        for y, row in enumerate(rows):
            for x, dots in enumerate(row):
                if dots != " " and not (curve.is_dashed and x % 3 == 2):
                    cells[y][x] = dots, curve.role
    lines = []
    for label, drawn in zip(axes.labels, cells, strict=True):
        line = Line(label.rjust(axes.label_width), "muted").add(" " * (axes.label_width >= 0))
        for role, run in groupby(drawn, key=lambda cell: cell[1]):
            line.add("".join(text for text, _ in run), role)
        lines.append(line.crop(width))
    return Plot(lines, axes.label_width + 1)


def _background(
    axes: _Axes, height: int, window: Window, cursor: float | None, look: Style
) -> list[list[tuple[str, Role]]]:
    dot, bar = ("-", "|") if look.glyphs.is_ascii else ("\u00b7", "\u2502")
    cells: list[list[tuple[str, Role]]] = []
    for label in axes.labels:
        row: list[tuple[str, Role]] = [(" ", "text")] * axes.plot_width
        if label:
            row[::GRID_EVERY] = [(dot, "faint")] * len(row[::GRID_EVERY])
        cells.append(row)
    if cursor is not None and window[0] <= cursor <= window[1]:
        share = (cursor - window[0]) / ((window[1] - window[0]) or 1)
        for y in range(height):
            cells[y][round(share * (axes.plot_width - 1))] = bar, "accent"
    return cells


def x_at(
    shown: Sequence[Series],
    width: int,
    height: int,
    x: int,
    window: Window,
    *,
    is_log: bool,
    least_span: float = 0.0,
) -> float | None:
    """Return the step of a plot's column; None: it is among the labels."""
    values = [value for each in shown for _, value in _points(each, is_log=is_log)]
    if not values or height < 1:
        return None
    axes = _axes(values, width, height, is_log=is_log, least_span=least_span)
    place = x - axes.label_width - 1
    if place < 0:
        return None
    share = min(1.0, place / max(1, axes.plot_width - 1))
    return window[0] + share * (window[1] - window[0])


def _points(series: Series, *, is_log: bool) -> list[tuple[float, float]]:
    return [
        (step, math.log10(value) if is_log else value)
        for step, value in zip(series.steps, series.values, strict=True)
        if abs(value) <= MAX_VALUE and (value > 0 or not is_log)
    ]


def nice_scale(low: float, high: float, *, ticks: int) -> Scale:
    """Return a range with about ``ticks`` round numbers: multiples of 1, 2 or 5 x 10^n."""
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-300):
        # All values are the same: any range around them will do.
        margin = abs(high) * 0.1 if abs(high) > 1e-300 else 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / max(1, ticks)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    steps = [factor * magnitude for factor in (0.5, 1, 2, 5, 10)]
    place = sum(step < rough for step in steps[:-1])
    # A step longer than the preferred one may have only one multiple in the range.
    for step in (steps[place], steps[place - 1]):
        found = tuple(step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1))
        if len(found) >= 2:
            break
    return Scale(low=low, high=high, step=step, ticks=found)


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
    largest = max(map(abs, scale.ticks), default=0.0)
    for tick in scale.ticks:
        place = round((scale.high - tick) / (scale.high - scale.low) * (height - 1))
        digits = 3 if scale.step > 0.05 else 6  # or both ends of a narrow range read the same
        power = f"{10.0**tick:.{digits}g}" if is_log else ""
        labels[place] = power or tick_label(tick, scale.step, largest)
    return labels


_THOUSANDS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def tick_label(value: float, step: float, largest: float) -> str:
    """Return ``value`` in the unit of ``largest``, with the decimals that tell it from others."""
    size = max(largest, step)
    if size >= 1e15 or step < 1e-4:
        digits = max(2, 1 + math.floor(math.log10(size)) - math.floor(math.log10(step) + 1e-9))
        return f"{value:.{digits}g}" if value else "0"
    if size >= 1e5:
        unit, letter = next(each for each in _THOUSANDS if size >= each[0])
        return tick_label(value / unit, step / unit, largest / unit) + letter if value else "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}"


def _rasterise(
    points: Sequence[tuple[float, float]],
    scale: Scale,
    width: int,
    height: int,
    span: Window,
    *,
    is_ascii: bool,
) -> list[str]:
    across, down = (1, 2) if is_ascii else (2, 4)
    columns, rows = width * across, height * down
    first, last = span
    dots = _Dots(width, height, is_ascii=is_ascii)
    before: tuple[int, int] | None = None
    for x, entry, lowest, highest, leave in _by_column(points, first, last, columns):
        y_entry, y_low, y_high, y_leave = (
            _row_of(value, scale, rows) for value in (entry, lowest, highest, leave)
        )
        for y in range(y_high, y_low + 1):
            dots.draw(x, y)
        if before is not None:
            _connect(dots, before, (x, y_entry))
        before = (x, y_leave)
    return dots.as_text()


def _by_column(
    points: Sequence[tuple[float, float]], first: float, last: float, columns: int
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


class _Dots:
    """A picture of dots, several to a character.

    Args:
        width: Characters of a line.
        height: Lines.
        is_ascii: Two dots to a character, above each other; else the eight of Braille.
    """

    def __init__(self, width: int, height: int, *, is_ascii: bool) -> None:
        self._bits = _ASCII_BITS if is_ascii else _BRAILLE_BITS
        self._signs = _ASCII_SIGNS if is_ascii else _BRAILLE_SIGNS
        self._lines = [[0] * width for _ in range(height)]

    def draw(self, x: int, y: int) -> None:
        """Draw a dot, at columns and rows of dots."""
        across, down = len(self._bits), len(self._bits[0])
        self._lines[y // down][x // across] |= self._bits[x % across][y % down]

    def as_text(self) -> list[str]:
        """Return the lines."""
        return ["".join(map(self._signs.__getitem__, line)) for line in self._lines]


def _connect(dots: _Dots, start: tuple[int, int], end: tuple[int, int]) -> None:
    """Draw a straight line between two dots, gapless."""
    (x0, y0), (x1, y1) = start, end
    length = max(abs(x1 - x0), abs(y1 - y0), 1)
    for place in range(length + 1):
        dots.draw(x0 + round((x1 - x0) * place / length), y0 + round((y1 - y0) * place / length))


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
