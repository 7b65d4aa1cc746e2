"""A run as one HTML page that needs nothing else: charts as inline SVG, tables, no script.

Texts of a job are escaped, and the page forbids itself to load or to run anything.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

import msgspec

from boltmesh.telemetry.snapshot import operator_name
from boltmesh.tui import units
from boltmesh.tui.metrics.experts import layer_loads
from boltmesh.tui.metrics.figures import DefinedFigure, figures
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.pipelines import bubble
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.metrics.status import job_stalled_seconds, status
from boltmesh.tui.metrics.step_time import phase_split
from boltmesh.tui.panels.chart import MAX_VALUE, nice_scale, tick_label
from boltmesh.tui.panels.differences import FIGURES
from boltmesh.tui.panels.history import Chart, charts
from boltmesh.tui.panels.texts import config_entries, output_lines
from boltmesh.tui.panels.throughput import phase_label, phases_title
from boltmesh.tui.panels.traffic import difference_words, shown_traffic
from boltmesh.tui.sanitize import clean
from boltmesh.tui.state import Series, State
from boltmesh.tui.view import TableView

WIDTH: Final = 460
HEIGHT: Final = 180
MARGIN: Final = 60
MAX_LINES: Final = 200
"""Lines of output, and events, on the page."""

_COLOURS: Final = {
    "data": "#8a6d3b",
    "transfer": "#b08d57",
    "forward": "#4f8cc9",
    "backward": "#2f5f94",
    "communication": "#a05a9c",
    "optimizer": "#4a9a6a",
    "validation": "#999999",
    "checkpoint": "#666666",
    "bubble": "#c9884f",
}
_STYLE: Final = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1000px;padding:0 1rem;
color:#222}
h1{font-size:1.5rem;margin-bottom:0}
h2{font-size:1.1rem;border-bottom:1px solid #ccc;margin-top:2rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.15rem .6rem .15rem 0;
border-bottom:1px solid #eee;vertical-align:top;overflow-wrap:break-word}
th{color:#666;font-weight:500}
pre{background:#f5f5f5;padding:.7rem;overflow-x:auto;font-size:12px}
.state{font-weight:600}.good{color:#187a4a}.warn{color:#a05a00}.bad{color:#b3261e}
.charts{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0}figcaption{color:#444}
"""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(state: State) -> str:
    """Return the whole page."""
    job = state.job
    name = _text(job.name)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{name}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{name}</h1>",
        _summary(state),
        _section("Findings", _findings(state)),
        _section("Headline figures", _figures(state)),
        _section("Charts", _charts(charts(state))),
        _section(phases_title(state).capitalize(), _phases(state)),
        _section("Bubble of the pipeline", _bubble(state)),
        _section("Ranks", _ranks(state)),
        _section("Memory", _memory(state)),
        _section("Communication per step and rank", _traffic(state)),
        _section("Experts", _experts(state)),
        _section("Config", _table((), ((e.key, e.value) for e in config_entries(job)))),
        _section("Events", _events(state)),
        _section("Output", _output(state)),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _text(value: str) -> str:
    return escape(clean(value))


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}" if content else ""


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    if not body:
        return ""
    head = "".join(f"<th>{_text(title)}</th>" for title in titles)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}\n{body}</table>"


def _summary(state: State) -> str:
    job = state.job
    stalled_s = job_stalled_seconds(state)
    word: str = "stopped" if job.stop_reason is not None else job.state
    level = {"running": "good", "finished": "good"}.get(word, "bad")
    if stalled_s is not None:
        word, level = f"stalled {units.duration(stalled_s)}", "warn"
    elif word == "stopped":
        level = "warn"
    said = status(state)
    limit = "" if job.max_steps is None else f" of {units.count(job.max_steps)}"
    facts = " · ".join(
        [
            job.strategy,
            units.mesh(job.mesh, job.world_size),
            f"step {units.count(job.global_step)}{limit}",
            f"{units.duration(max(0.0, job.updated - job.started))} long",
        ]
    )
    why = "" if said is None else f"<p>{_text(said.text)}</p>"
    return f'<p><span class="state {level}">{_text(word)}</span> · {_text(facts)}</p>{why}'


def _findings(state: State) -> str:
    items = [
        f'<li class="{finding.severity}"><b>{_text(finding.headline)}</b> '
        f"{_text(' · '.join(finding.evidence))}<br>{_text(finding.advice)}</li>"
        for finding in diagnose(state)
    ]
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _figures(state: State) -> str:
    known = msgspec.structs.asdict(figures(state))
    rows = [
        (name, FIGURES[name][1](figure.latest) + _age(figure), figure.definition)
        for name, figure in known.items()
        if figure.latest is not None
    ]
    return _table(("figure", "value", "definition"), rows)


def _age(figure: DefinedFigure) -> str:
    return "" if figure.age_s is None else f", {units.duration(figure.age_s)} ago"


def _charts(found: Sequence[Chart]) -> str:
    drawn = "\n".join(svg for chart in found if (svg := _chart(chart)))
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _chart(chart: Chart) -> str:
    lines = [_finite(chart.series)]
    if chart.beside is not None:
        lines.append(_finite(chart.beside))
    points = [point for line in lines for point in line]
    if len(points) < 2:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    scale = nice_scale(min(values), max(values), ticks=4)
    first, last = min(steps), max(steps)

    def place(step: float, value: float) -> str:
        x = MARGIN + (step - first) / max(1, last - first) * (WIDTH - MARGIN - 8)
        y = 8 + (scale.high - value) / (scale.high - scale.low) * (HEIGHT - 32)
        return f"{x:.1f},{y:.1f}"

    parts = []
    largest = max(map(abs, scale.ticks), default=0.0)
    for tick in scale.ticks:
        label = tick_label(tick, scale.step, largest)
        y = 8 + (scale.high - tick) / (scale.high - scale.low) * (HEIGHT - 32)
        parts.append(
            f'<line x1="{MARGIN}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{MARGIN - 4}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    colours = ("#2f5f94", "#c9884f")
    for line, colour in zip(lines, colours, strict=False):
        path = " ".join(place(step, value) for step, value in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
    parts.append(
        f'<text x="{MARGIN}" y="{HEIGHT - 6}">step {first:,}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">{last:,}</text>'
    )
    names = [_text(chart.title)]
    if chart.beside is not None:  # each name has the colour of its curve
        both = zip((chart.title, chart.beside_name), colours, strict=True)
        names = [f'<span style="color:{colour}">{_text(name)}</span>' for name, colour in both]
    return (
        f"<figure><figcaption>{', '.join(names)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-size="11" '
        f'role="img">{"".join(parts)}</svg></figure>'
    )


def _finite(series: Series) -> list[tuple[float, float]]:
    pairs = zip(series.steps, series.values, strict=True)
    return [pair for pair in pairs if math.isfinite(pair[1]) and abs(pair[1]) <= MAX_VALUE]


def _phases(state: State) -> str:
    split = phase_split(state.job)
    if split is None:
        return ""
    total = sum(phase.seconds for phase in split.phases) or 1.0
    bars, names, x = [], [], 0.0
    for phase in split.phases:
        width = 960 * phase.seconds / total
        colour = _COLOURS.get(phase.name, "#bbbbbb")
        bars.append(f'<rect x="{x:.1f}" width="{width:.1f}" height="24" fill="{colour}"/>')
        names.append(
            f'<span style="color:{colour}">&#9632;</span> {_text(phase_label(phase.name))}'
        )
        x += width
    rows = [
        (phase_label(phase.name), units.seconds(phase.seconds), units.share(phase.seconds / total))
        for phase in split.phases
    ]
    return (
        '<svg viewBox="0 0 960 24" preserveAspectRatio="none" width="100%" height="24" role="img">'
        f"{''.join(bars)}</svg><p>{' '.join(names)}</p>" + _table(("phase", "time", "share"), rows)
    )


def _bubble(state: State) -> str:
    found = bubble(state)
    if found is None:
        return ""
    named = [(f"rank {row.rank}", row.parts) for row in found.rows]
    rows = [
        (name, *map(units.share, (p.measured, p.ideal, p.structural, p.imbalance, p.excess)))
        for name, p in [("mean", found.mean), *named]
    ]
    return _table(("", "idle", "ideal", "structural", "imbalance", "excess"), rows)


def _ranks(state: State) -> str:
    rows = [
        (
            str(row.rank),
            row.host,
            row.device,
            row.state,
            units.seconds(row.step_s),
            units.seconds(row.compute_s),
            units.memory(row.memory_used_bytes),
            row.error or "",
        )
        for row in rank_rows(state)
    ]
    return _table(("rank", "host", "device", "state", "step", "compute", "memory", "error"), rows)


def _memory(state: State) -> str:
    rows = [
        (
            str(rank.rank),
            f"{kind.kind} on {kind.place}",
            units.memory(kind.measured_bytes),
            units.memory(kind.predicted_bytes),
        )
        for rank in state.job.ranks[:8]
        for kind in rank.memory_kinds
        if kind.measured_bytes or kind.predicted_bytes
    ]
    return _table(("rank", "kind", "measured", "predicted"), rows)


def _traffic(state: State) -> str:
    rows = [
        (
            row.axis,
            operator_name(row.operator),
            units.traffic(row.payload_bytes),
            units.traffic(row.expected_bytes),
            difference_words(row),
            row.why or "",
        )
        for row in shown_traffic(state, TableView())
    ]
    return _table(("axis", "operator", "payload", "expected", "difference", "formula"), rows)


def _experts(state: State) -> str:
    rows = [
        (
            load.module,
            units.number(load.imbalance),
            units.number(load.least),
            str(load.num_idle),
            units.share(load.dropped_share),
            units.count(sum(load.rows)),
        )
        for load in layer_loads(state.job)
    ]
    return _table(("module", "max/mean", "min/mean", "idle", "dropped", "rows"), rows)


def _events(state: State) -> str:
    events = state.job.events[-MAX_LINES:]
    rows = [
        (f"{units.duration(event.time - state.job.started)}", f"{event.rank}", event.kind,
         event.message)
        for event in events
    ]  # fmt: skip
    return _table(("after", "rank", "kind", "message"), rows)


def _output(state: State) -> str:
    lines = output_lines(state.job)[:MAX_LINES]
    text = "\n".join(
        f"{line.rank:>3} {clean(line.time)} {clean(line.text)}" for line in reversed(lines)
    )
    return f"<pre>{escape(text)}</pre>" if text else ""
