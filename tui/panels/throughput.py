"""Samples and tokens a second, now and in the recent past, and the utilization of the devices.

``draw_phases`` shows the time of a step by phase: one stacked bar and its legend.
"""

import math
from collections.abc import Sequence
from typing import Literal

from boltmesh.telemetry.snapshot import JobSnapshot, PhaseTime, RankSnapshot
from boltmesh.tui import units
from boltmesh.tui.metrics.figures import DefinedFigure, Flops, figures, job_flops
from boltmesh.tui.metrics.status import rates_are_current
from boltmesh.tui.metrics.step_time import BUBBLE, PhaseSplit, batches_per_step, phase_split
from boltmesh.tui.render import bars
from boltmesh.tui.render.bars import bar, phase_role, sparkline, stacked_bar
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.style import Glyphs, Style, facts, heading, labelled, wrap_facts
from boltmesh.tui.state import State

Unit = Literal["samples", "tokens"]


def throughput(job: JobSnapshot, unit: Unit) -> float | None:
    """Return the job's recent rate."""
    return job.samples_per_second if unit == "samples" else job.tokens_per_second


def rate_figure(state: State, unit: Unit) -> DefinedFigure:
    """Return the headline figure of this unit."""
    found = figures(state)
    return found.samples_per_s if unit == "samples" else found.tokens_per_s


def rate_line(state: State, unit: Unit) -> Line:
    """Label and rate; of a job that is stalled or has ended the last one and its age, muted."""
    figure = rate_figure(state, unit)
    line = labelled(f"{unit}/s", units.rate(figure.value), "strong")
    past = past_rate(figure)
    return line.add(f" {past}", "muted") if past else line


def past_rate(figure: DefinedFigure) -> str:
    """Return the last rate and its age as text, empty while the rate is current."""
    if figure.last is None:
        return ""
    age = "" if figure.age_s is None else f" {units.duration(figure.age_s)} ago"
    return f"last {units.rate(figure.last)}{age}"


def throughput_over_time(job: JobSnapshot, unit: Unit, *, buckets: int) -> list[float]:
    """Return the job's rate in equal spans of the recent past, oldest first.

    One rank's records are scaled up to the job's rate: in synchronous training every rank keeps the
    same pace, and a job of a thousand ranks costs no more to draw. There are at most ``buckets``
    spans, and fewer where a span would hold less than two steps and show only noise.
    """
    job_rate = throughput(job, unit)
    rank = next((rank for rank in job.ranks if len(rank.steps) >= 3), None)
    if job_rate is None or rank is None:
        return []
    rank_rate = rank.samples_per_second if unit == "samples" else rank.tokens_per_second
    if not rank_rate:
        return []
    return [amount * job_rate / rank_rate for amount in _rate_in_spans(rank, unit, buckets=buckets)]


def _rate_in_spans(rank: RankSnapshot, unit: Unit, *, buckets: int) -> list[float]:
    """Return the rank's mean rate in each span, a step counted evenly over its own time."""
    first, *steps = rank.steps
    start, span_s = first.end_time, rank.steps[-1].end_time - first.end_time
    buckets = max(1, min(buckets, len(steps) // 2))
    if not 0 < span_s < math.inf or not all(math.isfinite(step.end_time) for step in steps):
        return []
    amounts = [0.0] * buckets
    began = 0.0
    for step in steps:
        ended = min((step.end_time - start) / span_s * buckets, float(buckets))
        # A clock that was set back while the job ran leaves a step without time.
        if ended > began:
            amount, place = getattr(step, unit) or 0, int(began)
            if ended <= place + 1 <= buckets:
                amounts[place] += amount
            else:
                density = amount / (ended - began)
                for each in range(place, min(int(ended) + 1, buckets)):
                    overlap = min(ended, each + 1) - max(began, each)
                    amounts[each] += density * max(0.0, overlap)
            began = ended
    return [amount * buckets / span_s for amount in amounts]


_UNITS: tuple[Unit, ...] = ("samples", "tokens")
_LABEL_WIDTH = 9
_FIGURE_WIDTH = 10
_SPARKLINE_FROM_WIDTH = 8


def draw_throughput(state: State, width: int, height: int, look: Style) -> list[Line]:
    """A line for each unit that the job counts, or all of them in the only line there is."""
    known: list[Unit] = [unit for unit in _UNITS if throughput(state.job, unit) is not None] or [
        "samples"
    ]
    flops = job_flops(state)
    ratio = figures(state).bubble_ratio.value
    if height == 1 and len(known) + (flops is not None) + (ratio is not None) > 1:
        return [_draw_side_by_side(state, known, flops, width, look)]
    lines = [_draw(state, unit, width, look) for unit in known]
    if flops is not None:
        lines.append(_draw_flops(flops, width, look))
    if ratio is not None:
        lines.append(_draw_bubble(ratio, width, look, has_level=rates_are_current(state)))
    if look.has_headings and height > len(lines):
        lines.insert(0, heading("throughput", width, look))
    return lines[: max(0, height)]


def flops_words(flops: Flops) -> tuple[str, str]:
    """Return the unit and its figure: the share of the peak if that is known."""
    if flops.utilization is None:
        return "compute", units.flops(flops.per_second)
    return "MFU", f"{flops.utilization:.1%}"


def hardware_words(flops: Flops) -> tuple[str, str] | None:
    """Return the same of hardware FLOPs; None where they are those of the model."""
    if not flops.is_recomputing:
        return None
    if flops.hardware_utilization is None:
        return "hardware", units.flops(flops.hardware_per_second)
    return "HFU", f"{flops.hardware_utilization:.1%}"


def _draw_side_by_side(
    state: State, known: Sequence[Unit], flops: Flops | None, width: int, look: Style
) -> Line:
    cells = (width - 2) // len(known)
    parts = [_draw(state, unit, cells, look) for unit in known]
    ratio = figures(state).bubble_ratio.value
    has_ratios = flops is not None or ratio is not None
    if not has_ratios and all(part.width == cells for part in parts):
        return facts(parts, width)
    parts = [rate_line(state, unit) for unit in known]
    if flops is not None:
        parts.append(labelled(*flops_words(flops), "strong"))
        if (hardware := hardware_words(flops)) is not None:
            parts.append(labelled(*hardware))
    if ratio is not None:
        parts.append(labelled("bubble", units.share(ratio), "strong"))
    return facts(parts, width)


def _draw_flops(flops: Flops, width: int, look: Style) -> Line:
    """Label and figure, a bar of the share, and the rate that it stands for."""
    label, figure = flops_words(flops)
    line = Line(label.ljust(_LABEL_WIDTH), "muted")
    line.add(figure.rjust(_FIGURE_WIDTH), "strong")
    if (hardware := hardware_words(flops)) is not None:
        told = labelled(*hardware)
        if line.width + 2 + told.width <= width:
            line.add("  ").join(told)
    if flops.utilization is None:
        reason = "no peak known, so no MFU"
        if line.width + 2 + len(reason) <= width:
            line.add(f"  {reason}", "muted")
        return line.crop(width)
    rate = Line(units.flops(flops.per_second), "muted")
    room = width - line.width - rate.width - 4
    if room >= _SPARKLINE_FROM_WIDTH:
        level = bars.MFU.level(flops.utilization)
        line.add("  ").join(bar(flops.utilization, room, look.glyphs, role=level))
    if line.width + 2 + rate.width <= width:
        line.add("  ").join(rate)
    return line.crop(width)


def _draw_bubble(ratio: float, width: int, look: Style, *, has_level: bool) -> Line:
    line = Line("bubble".ljust(_LABEL_WIDTH), "muted")
    line.add(units.share(ratio).rjust(_FIGURE_WIDTH), "strong")
    room = width - line.width - 2
    if room >= _SPARKLINE_FROM_WIDTH:
        role: Role = bars.BUBBLE.level(ratio) if has_level else "chart"
        line.add("  ").join(bar(ratio, room, look.glyphs, role=role))
    return line.crop(width)


def _draw(state: State, unit: Unit, width: int, look: Style) -> Line:
    """Label and figure, and a sparkline where it fits; figures are never cut.

    The last figure and its age replace it once the job is stalled or has ended.
    """
    line = Line(f"{unit}/s".ljust(_LABEL_WIDTH), "muted")
    figure = rate_figure(state, unit)
    line.add(units.rate(figure.value).rjust(_FIGURE_WIDTH), "strong")
    room = width - line.width - 2
    if not rates_are_current(state):
        last = past_rate(figure)
        line = line.add("  ").add(last, "muted") if len(last) <= room else line
        return line.crop(width)
    if room >= _SPARKLINE_FROM_WIDTH:
        values = throughput_over_time(state.job, unit, buckets=room)
        line.add("  ").join(sparkline(values, room, look.glyphs))
    return line.crop(width)


_LABELS = {"transfer": "host to device", "communication": "exposed comm", BUBBLE: "pipeline idle"}
"""The share of the bubble in a step is not the bubble ratio, which is of the pipeline's window."""


def draw_phases(state: State, width: int, height: int, look: Style) -> list[Line]:
    """A heading and a legend line for each phase; with fewer lines the legend is packed.

    A single line has words and no bar: a bar says nothing without its legend.
    """
    split = phase_split(state.job)
    if split is None:
        return _draw_nothing(width, height, look)
    label = phases_title(state)
    if look.has_headings and height >= 3:
        title = heading(label, width, look, right=Line(units.seconds(split.seconds), "strong"))
        bar = stacked_bar(split.phases, width, look.glyphs)
        room = height - 2
        legend = _legend(split, look.glyphs)
        if len(legend) > room:
            legend = _pack(split, width, look.glyphs)
        return [title, bar, *(line.crop(width) for line in legend[:room])]
    bar = Line(f"{label} ", "muted").add(units.seconds(split.seconds), "strong").add("  ")
    room = max(0, width - bar.width)
    if height == 1:
        return [bar.join(_pack(split, room, look.glyphs)[0]).crop(width)]
    bar.join(stacked_bar(split.phases, room, look.glyphs))
    return [bar.crop(width), *_pack(split, width, look.glyphs)][:height]


def phases_title(state: State) -> str:
    """Name the unit of the records: a step, or one of the batches that a step accumulates."""
    batches = batches_per_step(state.job)
    return "step time" if batches == 1 else f"batch time, {batches} a step"


def _draw_nothing(width: int, height: int, look: Style) -> list[Line]:
    if look.has_headings and height >= 2:
        return [heading("step time", width, look), Line("no step yet", "muted").crop(width)]
    return [Line("step time  no step yet", "muted").crop(width)][:height]


def _legend(split: PhaseSplit, glyphs: Glyphs) -> list[Line]:
    names = max(len(phase_label(phase.name)) for phase in split.phases)
    lines = []
    for phase in split.phases:
        line = Line(glyphs.phases[phase.name] * 2, phase_role(phase.name)).add(" ")
        line.add(phase_label(phase.name).ljust(names)).add(units.seconds(phase.seconds).rjust(10))
        lines.append(line.add(phase_share(phase, split).rjust(6), "muted"))
    return lines


def _pack(split: PhaseSplit, width: int, glyphs: Glyphs) -> list[Line]:
    """The legend in running lines, ``forward 28%``, the longest phases first."""
    entries = [
        Line(glyphs.phases[phase.name], phase_role(phase.name))
        .add(f" {phase_label(phase.name)} ", "muted")
        .add(phase_share(phase, split))
        for phase in sorted(split.phases, key=lambda phase: -phase.seconds)
    ]
    return wrap_facts(entries, width, gap=2)


def phase_label(name: str) -> str:
    """Return the name of a phase; names that say too little are spelt out."""
    return _LABELS.get(name, name)


def phase_share(phase: PhaseTime, split: PhaseSplit) -> str:
    """Return the phase's share of the step; a small share is never shown as zero."""
    share = 100 * phase.seconds / split.seconds
    return "<1%" if share < 0.5 else units.percent(share)
