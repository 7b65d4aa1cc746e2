"""The part of a series that a chart shows: zoom, pan, moving mean, and the value at a place."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from boltmesh.tui.state import Series
from boltmesh.tui.view import View

SMOOTH = 0.9
"""Weight of the past in a moving mean, at the mean distance of the points that are shown."""

Window = tuple[float, float]
"""First and last step, or second, of the charts."""


def window_of(shown: Iterable[Series], view: View) -> Window:
    """Return the common range of the charts of these series: all of it, or a part."""
    ends = [(each.steps[0], each.steps[-1]) for each in shown if each.steps]
    first, last = (min(a for a, _ in ends), max(b for _, b in ends)) if ends else (0.0, 0.0)
    length = (last - first) / 2**view.zoom
    end = last if view.pan is None else min(max(view.pan, first + length), last)
    return end - length, end


def seen_through(series: Series, view: View, window: Window | None = None) -> Series:
    """Return the visible part of a series, as a moving mean if wanted."""
    steps, values = series.steps, series.values
    part = slice(len(steps))
    if view.zoom and steps:
        first, last = window or window_of([series], view)
        part = slice(bisect_left(steps, first), bisect_right(steps, last))
    if view.is_smooth:
        shown = steps[part]
        gap = (shown[-1] - shown[0]) / (len(shown) - 1) if len(shown) > 1 else 0.0
        values = _moving_mean(series, gap or 1.0)
    return Series(steps[part], values[part])


def _moving_mean(series: Series, gap: float) -> tuple[float, ...]:
    """Return exponential means over equal stretches: newest points lie closer than early ones."""
    mean, before = math.nan, 0.0
    means = []
    for step, value in zip(series.steps, series.values, strict=True):
        if math.isfinite(value):
            weight = SMOOTH ** ((step - before) / gap)
            mean = value if math.isnan(mean) else weight * mean + (1 - weight) * value
            before = step
        means.append(mean if math.isfinite(value) else value)
    return tuple(means)


def value_at(series: Series, x: float) -> float | None:
    """Return the value at the point that is nearest to a step; None far beyond the ends."""
    steps = series.steps
    if not steps:
        return None
    room = 2 * (steps[-1] - steps[0]) / max(1, len(steps) - 1)
    if not steps[0] - room <= x <= steps[-1] + room:
        return None
    after = min(bisect_left(steps, x), len(steps) - 1)
    before = max(0, after - 1)
    return series.values[before if x - steps[before] <= steps[after] - x else after]


def view_words(view: View) -> str:
    """Return how charts are looked at, where that is not the usual way."""
    part = "newest " if view.pan is None else ""
    words = [f"{part}1/{2**view.zoom}"] if view.zoom else []
    return "  ".join([*words, *(["smooth"] if view.is_smooth else [])])
