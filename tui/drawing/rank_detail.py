"""Everything that is known of one rank: in one column, or in two where they fit side by side."""

from collections.abc import Callable, Sequence

from boltmesh.telemetry.snapshot import RankSnapshot
from boltmesh.tui import units
from boltmesh.tui.drawing.bars import phase_role, sparkline
from boltmesh.tui.drawing.events import event_line
from boltmesh.tui.drawing.line import Line, Role
from boltmesh.tui.drawing.look import Look, heading, labelled, wrap_facts
from boltmesh.tui.drawing.offload import draw_offload
from boltmesh.tui.drawing.phases import phase_label
from boltmesh.tui.drawing.rank_table import cause_words, late_share
from boltmesh.tui.drawing.rank_traffic import draw_groups, draw_rank_traffic
from boltmesh.tui.drawing.ranks import rank_phase, rank_state
from boltmesh.tui.drawing.table import Cell, Column, draw_table
from boltmesh.tui.drawing.throughput import flops_words
from boltmesh.tui.drawing.words import sentence
from boltmesh.tui.figures.events import event_rows
from boltmesh.tui.figures.flops import rank_flops
from boltmesh.tui.figures.offload import rows_of_rank
from boltmesh.tui.figures.profile import middle
from boltmesh.tui.figures.rank_phases import phases_beside_peers
from boltmesh.tui.figures.ranks import RankRow, rank_rows
from boltmesh.tui.state import State

LEAST_DIFFERENCE_S = 0.0001
"""Less is the clock's and the host's."""

TWO_COLUMNS_FROM_WIDTH = 110
_GUTTER = 3
_MAX_EVENTS = 6

_Section = Callable[[int], list[Line]]
"""Width to lines, the first of them a heading; no lines where there is nothing to tell."""


def draw_rank_detail(
    state: State, width: int, height: int, look: Look, *, rank: int = 0
) -> list[Line]:
    """One rank in full; what does not fit is cut off at the bottom."""
    found = next((each for each in state.job.ranks if each.rank == rank), None)
    row = next((each for each in rank_rows(state) if each.rank == rank), None)
    if found is None or row is None:
        return [Line(f"rank {rank} is not in this job", "muted").crop(width)][: max(0, height)]
    first: list[_Section] = [
        lambda room: _draw_times(found, row, room, look),
        lambda room: _draw_phases(state, row, room, look),
        lambda room: _draw_work(state, found, row, room, look),
        lambda room: _draw_offload(found, room, look),
        lambda room: _draw_events(state, found, room, look),
    ]
    second: list[_Section] = [
        lambda room: draw_groups(state, found, room, look),
        lambda room: draw_rank_traffic(found, room, look),
        lambda room: _draw_memory(state, found, row, room, look),
    ]
    lines = _draw_identity(state, found, row, width, look)
    if width < TWO_COLUMNS_FROM_WIDTH:
        # Where a rank waits says the most of one that is in trouble.
        sections = [*first[:2], second[0], *first[2:], *second[1:]]
        lines += _stack(sections, width, height - len(lines), look)
    else:
        half = (width - _GUTTER) // 2
        left = _stack(first, half, height - len(lines), look)
        right = _stack(second, width - _GUTTER - half, height - len(lines), look)
        lines += _beside(left, right, half)
    return [line.crop(width) for line in lines[: max(0, height)]]


def _stack(sections: Sequence[_Section], width: int, height: int, look: Look) -> list[Line]:
    drawn = [found for section in sections if (found := section(width))]
    # Blank lines between the sections, unless they would cost others their place.
    gap = int(sum(map(len, drawn)) + len(drawn) <= height and look.has_headings)
    lines: list[Line] = []
    for section in drawn:
        lines += [Line() for _ in range(gap)]
        lines += section
    return lines[: max(0, height)]


def _beside(left: Sequence[Line], right: Sequence[Line], width: int) -> list[Line]:
    lines = []
    for place in range(max(len(left), len(right))):
        line = left[place].crop(width) if place < len(left) else Line()
        if place < len(right):
            line.pad_to(width + _GUTTER).join(right[place])
        lines.append(line)
    return lines


def _draw_identity(
    state: State, rank: RankSnapshot, row: RankRow, width: int, look: Look
) -> list[Line]:
    mesh = state.job.mesh
    places = [f"{axis} {at}" for axis, at in rank.coordinates.items() if mesh.get(axis, 1) > 1]
    title = f"rank {rank.rank}" + (f": {', '.join(places)}" if places else "")
    ago_s = max(0.0, (state.time if state.job.state == "running" else state.job.updated))
    silent_s = max(0.0, ago_s - rank.last_seen) if rank.last_seen else None
    parts = [
        labelled("device", rank.device or units.UNKNOWN),
        labelled("host", rank.host or units.UNKNOWN),
        labelled("pid", str(rank.pid) if rank.pid is not None else units.UNKNOWN),
        Line("in ", "muted").join(rank_phase(rank.phase, look)),
        labelled("last seen", units.UNKNOWN if silent_s is None else _ago(silent_s)),
        labelled("step", units.count(rank.global_step)),
        labelled("epoch", units.count(rank.epoch)),
    ]
    if row.behind:
        parts.append(labelled("behind", units.count(row.behind), "warn"))
    if rank.skipped_records:
        parts.append(labelled("skipped records", units.count(rank.skipped_records), "warn"))
    if rank.device_uuid:
        parts.append(labelled("uuid", rank.device_uuid))
    lines = [heading(title, width, look, right=rank_state(rank.state, look))]
    lines += wrap_facts(parts, width)
    if rank.is_summary:
        text = "on another host: known only by the summary that it sends through the job's store"
        lines += sentence(text, width, look, role="muted")
    if rank.error:
        lines += sentence(rank.error, width, look, mark=look.sign(look.glyphs.failed), role="bad")
    return lines


def _ago(seconds: float) -> str:
    return "now" if seconds < 2 else f"{units.duration(seconds)} ago"


def _draw_times(rank: RankSnapshot, row: RankRow, width: int, look: Look) -> list[Line]:
    if not rank.steps:
        return []
    times = [step.seconds for step in rank.steps]
    parts = [
        labelled("mean", units.seconds(row.step_s), "strong"),
        labelled("median", units.seconds(middle(times))),
        labelled("shortest", units.seconds(min(times))),
        labelled("longest", units.seconds(max(times))),
    ]
    title = f"step time, {len(times)} steps"
    return [
        heading(title, width, look),
        *wrap_facts(parts, width),
        sparkline(times, min(width, len(times)), look.glyphs),
    ]


def _draw_phases(state: State, row: RankRow, width: int, look: Look) -> list[Line]:
    phases = phases_beside_peers(state.job, row.rank)
    if not phases:
        return []
    patterns = look.glyphs.phases
    cells: list[list[Cell]] = []
    for phase in phases:
        name = Line(patterns[phase.name] * 2 + " ", phase_role(phase.name))
        difference = None if phase.peers_s is None else phase.seconds - phase.peers_s
        cells.append(
            [
                name.add(phase_label(phase.name)),
                units.seconds(phase.seconds),
                Line(units.seconds(phase.peers_s), "muted"),
                _difference(difference, row, phase.name),
            ]
        )
    columns = [
        Column("phase"),
        Column("this rank", is_number=True, steady_width=9),
        Column("its peers", is_number=True, steady_width=9, rank=1),
        Column("difference", is_number=True, steady_width=10, rank=2),
    ]
    lines = [heading("a typical step", width, look, right=late_share(row.lateness, look))]
    lines += draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    cause = cause_words(row)
    if row.lateness is not None and row.lateness.is_late and cause is not None:
        text = f"late: its own time is {units.seconds(row.lateness.own_s)}, "
        text += f"that of its peers {units.seconds(row.lateness.peers_s)}"
        lines += sentence(text, width, look, mark=look.sign("!"), role="warn")
    return lines


def _difference(seconds: float | None, row: RankRow, phase: str) -> Line:
    if seconds is None:
        return Line(units.UNKNOWN, "muted")
    late = row.lateness
    role: Role = "warn" if late is not None and late.is_late and late.phase == phase else "muted"
    if abs(seconds) < LEAST_DIFFERENCE_S:
        return Line("none", "muted")
    sign = "+" if seconds > 0 else "-"
    return Line(sign + units.seconds(abs(seconds)), role)


def _draw_work(
    state: State, rank: RankSnapshot, row: RankRow, width: int, look: Look
) -> list[Line]:
    parts = [labelled("loss", units.number(row.loss))] if row.loss is not None else []
    if row.samples_per_second is not None:
        parts.append(labelled("samples/s", units.rate(row.samples_per_second)))
    if row.tokens_per_second is not None:
        parts.append(labelled("tokens/s", units.rate(row.tokens_per_second)))
    flops = rank_flops(state.job, rank)
    if flops is not None:
        parts.append(labelled(*flops_words(flops)))
        if flops.utilization is not None:
            parts.append(Line(units.flops(flops.per_second), "muted"))
    return [heading("work", width, look), *wrap_facts(parts, width)] if parts else []


def _draw_memory(
    state: State, rank: RankSnapshot, row: RankRow, width: int, look: Look
) -> list[Line]:
    """The device as it is seen from outside, then what the rank says of its memory."""
    memory = rank.memory
    used = units.memory(row.memory_used_bytes)
    if row.memory_total_bytes is not None:
        used = f"{used} of {units.memory(row.memory_total_bytes)}"
    facts = {
        "utilisation": units.percent(row.utilization_percent),
        "memory": used,
        "temperature": _unit(row.temperature_celsius, "C"),
        "power": _unit(row.power_watts, "W"),
        "allocated": units.memory(memory.device_allocated_bytes),
        "held by torch": units.memory(memory.device_reserved_bytes),
        "peak": units.memory(memory.device_peak_bytes),
        "resident on host": units.memory(memory.host_rss_bytes),
    }
    parts = [labelled(name, text) for name, text in facts.items() if text != units.UNKNOWN]
    lines = [heading("device and memory", width, look), *wrap_facts(parts, width)]
    if rank.memory_kinds:
        columns = [
            Column("kind"),
            Column("place"),
            Column("measured", is_number=True),
            Column("predicted", is_number=True, rank=1),
        ]
        cells: list[list[Cell]] = [
            [
                kind.kind,
                kind.place,
                units.memory(kind.measured_bytes),
                Line(units.memory(kind.predicted_bytes), "muted"),
            ]
            for kind in rank.memory_kinds
        ]
        lines += draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    return lines if parts or rank.memory_kinds else []


def _draw_offload(rank: RankSnapshot, width: int, look: Look) -> list[Line]:
    lines = draw_offload(rows_of_rank(rank), width, look)
    return [heading("between the places", width, look), *lines] if lines else []


def _unit(value: float | None, unit: str) -> str:
    return units.UNKNOWN if value is None else f"{value:.0f} {unit}"


def _draw_events(state: State, rank: RankSnapshot, width: int, look: Look) -> list[Line]:
    own = tuple(event for event in state.job.events if event.rank == rank.rank)
    rows = event_rows(own)[-_MAX_EVENTS:]
    if not rows:
        return []
    lines = [event_line(row, state, width, look) for row in rows]
    return [heading("its events", width, look), *lines]
