"""The newest value of every logged metric."""

from boltmesh.tui import units
from boltmesh.tui.render.line import Line, Role, fit
from boltmesh.tui.render.style import Style, heading, spread
from boltmesh.tui.state import State, metric_names


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
