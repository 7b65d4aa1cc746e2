"""Idle time of the ranks of a pipeline by reason: the schedule, uneven stages, or the rest.

A bubble is measured over the common window of a pipeline, from the first start to the last end on
any of its ranks: 1 - busy / window. A rank's own window would flatter the late stages. It is made
of what the schedule costs with equal stages (structural), what the stages' unequal times add
(imbalance), and what is left (excess: communication, the host). The three add up to the measured.

``draw_boundaries`` shows for each pair of ranks the bytes between stages in an optimizer step,
measured beside expected.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import msgspec

from boltmesh.schedule_sim import (
    of_ideal,
)
from boltmesh.telemetry.snapshot import JobSnapshot, PipelinePlan
from boltmesh.tui import units
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.pipelines import (
    Bubble,
    BubbleRow,
    Parts,
    bubble,
    slowest_whole_step,
)
from boltmesh.tui.metrics.traffic import (
    STEPS_BEFORE_A_VERDICT,
    TOLERANCE,
    has_batches_of_several_sizes,
)
from boltmesh.tui.panels.peers import rank_pairs
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.ranks import fit_rows, nothing_to_show, row_names, where_text
from boltmesh.tui.render.style import Style, heading, labelled, wrap_facts
from boltmesh.tui.render.table import Cell, Column, draw_table
from boltmesh.tui.state import State

_ROLES: dict[str, Role] = {
    "structural": "bubble",
    "imbalance": "warn",
    "excess": "communication",
}
_MEANINGS = {
    "structural": "the schedule's own",
    "imbalance": "uneven stages",
    "excess": "communication, host",
}
_IN_FLIGHT_TITLE = "in flight"
_DEFINITION = "idle = 1 - busy / window, from the first start to the last end on any rank"
_IN_FLIGHT = "in flight: microbatches that a stage keeps for their backward, at most"
MIN_BAR_WIDTH = 10
MAX_BAR_WIDTH = 60
BARS_FROM_WIDTH = 70
TIMES_FROM_WIDTH = 140


def draw_bubble(state: State, width: int, height: int, look: Style) -> list[Line]:
    """A summary, a row for each rank of the pipeline, their mean, and the key of the signs."""
    found = bubble(state)
    if found is None:
        return nothing_to_show(state, "bubble", width, height, look)
    lines: list[Line] = []
    if look.has_headings and height >= 2:
        steps = "1 step" if found.num_steps == 1 else f"{found.num_steps} steps"
        title = f"bubble: mean of {steps}"
        title += where_text(found.place, found.num_pipelines)
        lines.append(heading(title, width, look, right=_share(found)))
    room = max(0, height - len(lines))
    table = _table(found, width, look)
    cells = width - table[0].width - 2
    if width >= BARS_FROM_WIDTH and cells < MIN_BAR_WIDTH:
        # The bars say more than how many microbatches are kept.
        table = _table(found, width, look, has_kept=False)
        cells = width - table[0].width - 2
    cells = min(MAX_BAR_WIDTH, cells)
    has_bars = width >= BARS_FROM_WIDTH and cells >= MIN_BAR_WIDTH
    if has_bars:
        bars = _bars(found, cells, look)
        table = [line.add("  ").join(bar) for line, bar in zip(table, bars, strict=True)]
    # The rows go before the second line of the summary, and before both the legend of their bars.
    summary = _summary(found, width)
    summary = summary[: max(1, room - len(table))]
    room -= len(summary)
    legend = _legend(found, width, look) if has_bars else []
    definitions = [_DEFINITION]
    definitions += [_IN_FLIGHT] if _IN_FLIGHT_TITLE in table[0].plain else []
    legend += [Line(each, "muted") for each in definitions if len(each) <= width]
    legend = legend[: max(0, room - len(table))]
    room -= len(legend)
    if room >= 2:
        summary += [table[0], *fit_rows(table[1:], room - 1, width)]
    return [line.crop(width) for line in [*lines, *summary, *legend][: max(0, height)]]


def _summary(found: Bubble, width: int) -> list[Line]:
    mean = found.mean
    whole = labelled("of total (idle/all)", _percent(mean.measured), "strong")
    busy = labelled("of ideal (idle/busy)", _percent(of_ideal(mean.measured)))
    if mean.ideal is not None:
        whole.add("  ideal ", "muted").add(_percent(mean.ideal))
        busy.add("  ideal ", "muted").add(_percent(of_ideal(mean.ideal)))
    return wrap_facts([whole, Line(_schedule(found), "muted"), busy], width)


def _schedule(found: Bubble) -> str:
    plan = found.plan
    if plan is None:
        return "schedule unknown: the order as it ran"
    return f"{plan.schedule}, {plan.num_stages} stages, {plan.num_microbatches} microbatches"


def _table(found: Bubble, width: int, look: Style, *, has_kept: bool = True) -> list[Line]:
    names = row_names([(row.rank, row.stages) for row in found.rows], width)
    # The mean comes first: it remains when there are more ranks than lines.
    rows = [("mean", found.mean), *zip(names, (row.parts for row in found.rows), strict=True)]
    columns = [
        Column(""),
        Column("idle", is_number=True),
        Column("ideal", is_number=True, rank=1),
        Column("structural", is_number=True, rank=3),
        Column("imbalance", is_number=True, rank=2),
        Column("excess", is_number=True, rank=2),
    ]
    has_times = width >= TIMES_FROM_WIDTH
    if has_times:
        columns += [Column(title, is_number=True) for title in _times(found.rows[0].seconds)]
    has_kept = has_kept and any(row.kept for row in found.rows)
    if has_kept:
        columns.append(Column(_IN_FLIGHT_TITLE, is_number=True, rank=4))
    kept = [Line(""), *map(_kept, found.rows)]
    means = {
        kind: sum(row.seconds.get(kind, 0.0) for row in found.rows) / len(found.rows)
        for kind in found.rows[0].seconds
    }
    times = [_times(seconds) for seconds in (means, *(row.seconds for row in found.rows))]
    cells: list[list[Cell]] = [
        [
            Line(name.rstrip(), "strong" if parts is found.mean else "muted"),
            Line(_percent(parts.measured), "strong"),
            _percent(parts.ideal),
            _percent(parts.structural),
            _signed(parts.imbalance),
            _signed(parts.excess),
            *(map(units.seconds, each.values()) if has_times else []),
            *([flight] if has_kept else []),
        ]
        for (name, parts), flight, each in zip(rows, kept, times, strict=True)
    ]
    return draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)


def _times(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the times of a batch by title, weight gradients if the schedule separates them."""
    forward, weight = seconds.get("F", 0.0), seconds.get("W")
    compute = sum(seconds.values())
    times = {"forward": forward, "backward": compute - forward - (weight or 0.0)}
    if weight is not None:
        times["weight grad"] = weight
    return times | {"compute": compute}


def _kept(row: BubbleRow) -> Line:
    """Microbatches that each stage has kept at once, and those planned where they differ."""
    text = "+".join(map(str, row.kept))
    if not row.planned or row.kept == row.planned:
        return Line(text, "muted")
    return Line(f"{text} of {'+'.join(map(str, row.planned))}", "warn")


def _bars(found: Bubble, cells: int, look: Style) -> list[Line]:
    """The scale, and a bar for the mean and for each rank."""
    rows = [found.mean, *(row.parts for row in found.rows)]
    scale = _scale(rows)
    end = _percent(scale, digits=0)
    header = Line("0", "muted").pad_to(cells - len(end)).add(end, "muted")
    return [header, *(_bar(parts, scale, cells, look) for parts in rows)]


def _scale(parts: Sequence[Parts]) -> float:
    """Return the share at the right end of the bars: the largest of all, rounded up."""
    top = max((max(each.measured, each.ideal or 0.0) for each in parts), default=0.0)
    step = 0.05 if top <= 0.3 else 0.1
    return min(1.0, max(step, math.ceil(top / step - 1e-9) * step))


def _bar(parts: Parts, scale: float, cells: int, look: Style) -> Line:
    """The parts one after the other, and a mark where the ideal schedule would end.

    Parts may be negative: a slow stage is idle less than the schedule alone would have it. The bar
    ends at what was measured, and each part has what the ones before have left of that.
    """
    glyphs = look.glyphs
    signs: list[tuple[str, Role]] = []
    reached = 0.0
    for name, level in _levels(parts):
        reached = min(parts.measured, max(reached, level))
        pattern = glyphs.bubble.get(name, glyphs.bar_full)
        fill = (pattern, _ROLES.get(name, "bubble"))
        signs += [fill] * (_cells(reached, scale, cells) - len(signs))
    signs += [(" ", "text")] * (cells - len(signs))
    if parts.ideal is not None:
        signs[min(cells - 1, _cells(parts.ideal, scale, cells))] = (glyphs.mark, "strong")
    line = Line()
    for (sign, role), run in itertools.groupby(signs):
        line.add(sign * len(list(run)), role)
    return line


def _levels(parts: Parts) -> list[tuple[str, float]]:
    """Return where each part ends."""
    if parts.structural is None or parts.imbalance is None:
        return [("idle", parts.measured)]
    simulated = parts.structural + parts.imbalance
    return [
        ("structural", min(parts.structural, simulated)),
        ("imbalance", simulated),
        ("excess", parts.measured),
    ]


def _cells(share: float, scale: float, cells: int) -> int:
    return max(0, min(cells, round(share / scale * cells)))


def _legend(found: Bubble, width: int, look: Style) -> list[Line]:
    if found.mean.structural is None:
        return []
    signs = look.glyphs.bubble
    parts = [
        Line(signs[name] * 2, role).add(f" {name}: {_MEANINGS[name]}", "muted")
        for name, role in _ROLES.items()
    ]
    parts.append(Line(look.glyphs.mark, "strong").add(" ideal", "muted"))
    return wrap_facts(parts, width)


def _share(found: Bubble) -> Line:
    about = " of total" if found.num_pipelines == 1 else " of all pipelines"
    return Line(_percent(found.ratio), "strong").add(about, "muted")


def _percent(share: float | None, *, digits: int = 1) -> str:
    if share is None or not math.isfinite(share):
        return units.UNKNOWN
    return f"{100 * share:.{digits}f}%"


def _signed(share: float | None) -> str:
    """A part that may be negative; a value that rounds to zero has no sign."""
    if share is None:
        return units.UNKNOWN
    rounded = round(100 * share, 1)
    return f"{rounded:+.1f}%" if rounded else "0.0%"


class Flow(msgspec.Struct, frozen=True):
    """Bytes from one rank to another in an optimizer step."""

    measured: float | None
    expected: float

    @property
    def is_equal(self) -> bool | None:
        """Whether the measured value is the expected one; None if nothing is measured."""
        if self.measured is None:
            return None
        return abs(self.measured - self.expected) <= TOLERANCE * self.expected


class Boundary(msgspec.Struct, frozen=True):
    """Two ranks whose stages follow each other."""

    ranks: tuple[int, int]
    """The first is earlier in the pipeline."""
    stages: tuple[int, ...]
    """The stages with a boundary between the two after them."""
    there: Flow
    """Traffic from the first rank to the second."""
    back: Flow
    is_of_several_sizes: bool = False
    """Whether recent batches differ in size, so that bytes differ from those of the first."""


@remember_last
def boundaries(job: JobSnapshot) -> tuple[Boundary, ...]:
    """Return the boundaries of the pipeline that ``bubble`` shows; none without a plan."""
    plan, step = job.pipeline, slowest_whole_step(job)
    if plan is None or step is None or not _is_told(plan, len(step.ranks)):
        return ()
    expected, between = _expected(plan)
    pairs = rank_pairs(job)
    is_early = job.global_step < STEPS_BEFORE_A_VERDICT

    def flow(first: int, second: int) -> Flow:
        measured = pairs.get((step.ranks[first], step.ranks[second]))
        return Flow(None if is_early else measured, expected.get((first, second), 0.0))

    return tuple(
        Boundary(
            ranks=(step.ranks[first], step.ranks[second]),
            stages=stages,
            there=flow(first, second),
            back=flow(second, first),
            is_of_several_sizes=has_batches_of_several_sizes(job),
        )
        for (first, second), stages in sorted(between.items())
    )


def _is_told(plan: PipelinePlan, num_ranks: int) -> bool:
    """Files of a job may hold anything."""
    count = len(plan.rank_of_stage)
    return count == len(plan.border_bytes) + 1 and all(
        0 <= rank < num_ranks for rank in plan.rank_of_stage
    )


def _expected(
    plan: PipelinePlan,
) -> tuple[Mapping[tuple[int, int], float], Mapping[tuple[int, int], tuple[int, ...]]]:
    """Return the bytes from rank to rank, and the stages with a boundary at their end."""
    expected: dict[tuple[int, int], float] = {}
    between: dict[tuple[int, int], tuple[int, ...]] = {}
    for stage, (forward, back) in enumerate(plan.border_bytes):
        sender, receiver = plan.rank_of_stage[stage], plan.rank_of_stage[stage + 1]
        if sender == receiver:
            continue
        for pair, num_bytes in (((sender, receiver), forward), ((receiver, sender), back)):
            expected[pair] = expected.get(pair, 0.0) + num_bytes
        ranks = (min(sender, receiver), max(sender, receiver))
        between[ranks] = (*between.get(ranks, ()), stage)
    return expected, between


def draw_boundaries(state: State, width: int, height: int, look: Style) -> list[Line]:
    """A table; nothing for a job without expected bytes."""
    found = boundaries(state.job)
    if not found:
        return []
    lines: list[Line] = []
    if look.has_headings and height >= 2:
        lines.append(heading("stage boundaries, bytes per step", width, look))
    columns = [
        Column("ranks"),
        Column("stages", rank=2),
        Column("activations fwd", is_number=True),
        Column("expected", is_number=True, rank=1),
        Column("gradients bwd", is_number=True),
        Column("expected", is_number=True, rank=1),
        Column("difference"),
    ]
    cells = [_boundary_cells(boundary, look) for boundary in found]
    table = draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    lines += [table[0], *fit_rows(table[1:], height - len(lines) - 1, width)]
    return lines[: max(0, height)]


def _boundary_cells(boundary: Boundary, look: Style) -> list[Cell]:
    first, second = boundary.ranks
    stages = ", ".join(f"{stage}-{stage + 1}" for stage in boundary.stages)
    return [
        Line(f"{first} - {second}", "muted"),
        Line(stages, "muted"),
        units.traffic(boundary.there.measured),
        Line(units.traffic(boundary.there.expected), "muted"),
        units.traffic(boundary.back.measured),
        Line(units.traffic(boundary.back.expected), "muted"),
        _verdict(boundary, look),
    ]


def _verdict(boundary: Boundary, look: Style) -> Line:
    there, back = boundary.there, boundary.back
    if there.is_equal is None or back.is_equal is None:
        return Line("counting", "muted")
    if there.is_equal and back.is_equal:
        return Line(look.sign(look.glyphs.equal) + "as expected", "good")
    if boundary.is_of_several_sizes:
        return Line("varies", "muted")
    return Line(look.sign(look.glyphs.differs) + "differs", "bad")
