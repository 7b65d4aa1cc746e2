"""Where the time of a step goes: one stacked bar and its legend."""

from boltmesh.telemetry.snapshot import PhaseTime
from boltmesh.tui import units
from boltmesh.tui.metrics.step_time import BUBBLE, PhaseSplit, batches_per_step, phase_split
from boltmesh.tui.render.bars import phase_role, stacked_bar
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Glyphs, Style, heading, wrap_facts
from boltmesh.tui.state import State

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
    """Name what the records are of: a step, or one of the batches that a step accumulates."""
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
    """Return what a phase is called: names that say less than what is measured are spelt out."""
    return _LABELS.get(name, name)


def phase_share(phase: PhaseTime, split: PhaseSplit) -> str:
    """Return the phase's share of the step; what is there is never called nothing."""
    share = 100 * phase.seconds / split.seconds
    return "<1%" if share < 0.5 else units.percent(share)
