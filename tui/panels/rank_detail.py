"""Everything that is known of one rank: in one column, or in two where they fit side by side.

Its phases are beside those of the ranks that do the same work. ``draw_groups`` has its place
in each process group, ``draw_rank_traffic`` its traffic in a step.
"""

from collections.abc import Callable, Sequence

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot, operator_name
from boltmesh.tui import units
from boltmesh.tui.metrics.figures import rank_flops
from boltmesh.tui.metrics.ranks import RankRow, rank_rows
from boltmesh.tui.metrics.status import rates_are_current
from boltmesh.tui.metrics.step_time import SPLIT_PHASES, batches_per_step, middle, rank_profiles
from boltmesh.tui.panels.events import event_line, event_rows
from boltmesh.tui.panels.offload import draw_offload, rows_of_rank
from boltmesh.tui.panels.rank_table import cause_words, late_share
from boltmesh.tui.panels.throughput import flops_words, hardware_words, phase_label, phases_title
from boltmesh.tui.render.bars import phase_role, sparkline
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.ranks import rank_phase, rank_state
from boltmesh.tui.render.style import Style, heading, labelled, sentence, wrap_facts
from boltmesh.tui.render.table import Cell, Column, draw_table
from boltmesh.tui.state import State


class PhaseBeside(msgspec.Struct, frozen=True):
    """One phase of an ordinary step, medians."""

    name: str
    seconds: float
    peers_s: float | None
    """Median of the others of its stage; None where there are none."""


def phases_beside_peers(job: JobSnapshot, number: int) -> list[PhaseBeside]:
    """Return the phases of a rank in the order of SPLIT_PHASES, except those never entered."""
    profiles = rank_profiles(job)
    own = profiles.get(number)
    rank = next((rank for rank in job.ranks if rank.rank == number), None)
    if own is None or rank is None:
        return []
    stage = rank.coordinates.get("pipeline", 0)
    peers = [
        profiles[other.rank]
        for other in job.ranks
        if other.rank != number
        and other.rank in profiles
        and other.coordinates.get("pipeline", 0) == stage
    ]
    found = []
    for name in SPLIT_PHASES:
        others = [peer.typical.get(name, 0.0) for peer in peers]
        seconds = own.typical.get(name, 0.0)
        if seconds or any(others):
            found.append(PhaseBeside(name, seconds, middle(others) if others else None))
    return found


_MAX_PEERS = 8


def draw_groups(state: State, rank: RankSnapshot, width: int, look: Style) -> list[Line]:
    """The collective that the rank entered last in each group, and whether it is through."""
    entered = [group for group in rank.groups if group.sequence]
    if not entered and rank.in_flight is None:
        return []
    columns = [
        Column("axis"),
        Column("ranks", rank=2, shrinks_to=8),
        Column("number", is_number=True),
        Column("last entered", shrinks_to=10),
        Column(""),
        Column("since", is_number=True, rank=1),
    ]
    cells: list[list[Cell]] = [
        [
            group.axis,
            units.ranks(group.ranks).removeprefix("ranks ") if group.ranks else units.UNKNOWN,
            units.count(group.sequence),
            operator_name(group.operator or units.UNKNOWN),
            _done(group.is_done, look),
            _since(state, group.time),
        ]
        for group in entered
    ]
    if not cells and (newest := rank.in_flight) is not None:
        cells = [
            [
                newest.axis,
                units.UNKNOWN,
                units.count(newest.sequence),
                operator_name(newest.operator),
                _done(newest.is_done, look),
                units.UNKNOWN,
            ]
        ]
    table = draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    return [heading("collectives", width, look), *table]


def draw_rank_traffic(rank: RankSnapshot, width: int, look: Style) -> list[Line]:
    """Traffic of this rank in a step, by operator, and by peer for calls between two ranks."""
    # A collective that ran only outside of steps, to set up or to save, is no part of a step.
    moved = [total for total in rank.collectives if total.calls_per_step != 0]
    if not moved and not rank.peers:
        return []
    columns = [
        Column("axis"),
        Column("operator", shrinks_to=11),
        Column("calls", is_number=True, rank=1),
        Column("payload", is_number=True),
        Column("time", is_number=True, rank=3),
        Column("since the start", is_number=True, rank=2),
    ]
    cells: list[list[Cell]] = [
        [
            total.axis,
            operator_name(total.operator),
            units.count(None if total.calls_per_step is None else round(total.calls_per_step, 1)),
            units.traffic(total.bytes_per_step),
            units.seconds(total.seconds_per_step),
            Line(units.traffic(total.payload_bytes), "muted"),
        ]
        for total in sorted(moved, key=lambda total: -(total.bytes_per_step or 0.0))
    ]
    busiest = sorted(rank.peers, key=lambda peer: -(peer.bytes_per_step or 0.0))[:_MAX_PEERS]
    cells += [
        [
            peer.axis,
            f"{peer.operator.strip('_')} {'from' if 'recv' in peer.operator else 'to'} {peer.peer}",
            units.UNKNOWN,
            units.traffic(peer.bytes_per_step),
            units.UNKNOWN,
            Line(units.traffic(peer.payload_bytes), "muted"),
        ]
        for peer in busiest
    ]
    table = draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    return [heading("moved in a step", width, look), *table]


def _done(is_done: bool | None, look: Style) -> Line:
    if is_done is None:
        return Line("not reported", "muted")
    if is_done:
        return Line(look.sign(look.glyphs.finished) + "done", "good")
    return Line(look.sign("!") + "inside", "warn")


def _since(state: State, time: float | None) -> str:
    if time is None:
        return units.UNKNOWN
    now = state.time if state.job.state == "running" else state.job.updated
    seconds = max(0.0, now - time)
    return units.seconds(seconds) if seconds < 1 else units.duration(seconds)


LEAST_DIFFERENCE_S = 0.0001
"""Less is the clock's and the host's."""

TWO_COLUMNS_FROM_WIDTH = 110
_GUTTER = 3
_MAX_EVENTS = 6

_Section = Callable[[int], list[Line]]
"""Width to lines, the first of them a heading; no lines where there is nothing to tell."""


def draw_rank_detail(
    state: State, width: int, height: int, look: Style, *, rank: int = 0
) -> list[Line]:
    """One rank in full; lines that do not fit are cut off at the bottom."""
    found = next((each for each in state.job.ranks if each.rank == rank), None)
    row = next((each for each in rank_rows(state) if each.rank == rank), None)
    if found is None or row is None:
        return [Line(f"rank {rank} is not in this job", "muted").crop(width)][: max(0, height)]
    first: list[_Section] = [
        lambda room: _draw_times(state, found, row, room, look),
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


def _stack(sections: Sequence[_Section], width: int, height: int, look: Style) -> list[Line]:
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
    state: State, rank: RankSnapshot, row: RankRow, width: int, look: Style
) -> list[Line]:
    mesh = state.job.mesh
    places = [f"{axis} {at}" for axis, at in rank.coordinates.items() if mesh.get(axis, 1) > 1]
    title = f"rank {rank.rank}" + (f": {', '.join(places)}" if places else "")
    silent_s = max(0.0, state.time - rank.last_seen) if rank.last_seen else None
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
    lines = [heading(title, width, look, right=rank_state(row.state, look))]
    lines += wrap_facts(parts, width)
    if rank.is_summary:
        text = "on another host: known only by the summary that it sends through the job's store"
        lines += sentence(text, width, look, role="muted")
    if rank.error:
        lines += sentence(rank.error, width, look, mark=look.sign(look.glyphs.failed), role="bad")
    return lines


def _ago(seconds: float) -> str:
    return "now" if seconds < 2 else f"{units.duration(seconds)} ago"


def _draw_times(
    state: State, rank: RankSnapshot, row: RankRow, width: int, look: Style
) -> list[Line]:
    if not rank.steps:
        return []
    times = [step.seconds for step in rank.steps]
    batches = batches_per_step(state.job)
    mean = None if row.step_s is None else row.step_s / batches
    parts = [
        labelled("mean", units.seconds(mean), "strong"),
        labelled("median", units.seconds(middle(times))),
        labelled("shortest", units.seconds(min(times))),
        labelled("longest", units.seconds(max(times))),
    ]
    title = f"{phases_title(state)}, {len(times)} {'steps' if batches == 1 else 'batches'}"
    return [
        heading(title, width, look),
        *wrap_facts(parts, width),
        sparkline(times, min(width, len(times)), look.glyphs),
    ]


def _draw_phases(state: State, row: RankRow, width: int, look: Style) -> list[Line]:
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
    share = Line("slower ", "muted").join(late_share(row.lateness, look))
    right = None if row.lateness is None else share
    lines = [heading("a typical step", width, look, right=right)]
    lines += draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    cause = cause_words(row)
    if row.lateness is not None and row.lateness.is_late and cause is not None:
        text = f"slower: its compute time is {units.seconds(row.lateness.own_s)}, "
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
    state: State, rank: RankSnapshot, row: RankRow, width: int, look: Style
) -> list[Line]:
    parts = [labelled("loss", units.number(row.loss))] if row.loss is not None else []
    if row.samples_per_second is not None:
        parts.append(labelled("samples/s", units.rate(row.samples_per_second)))
    if row.tokens_per_second is not None:
        parts.append(labelled("tokens/s", units.rate(row.tokens_per_second)))
    flops = rank_flops(state.job, rank)
    if flops is not None and rates_are_current(state):
        parts.append(labelled(*flops_words(flops)))
        if (hardware := hardware_words(flops)) is not None:
            parts.append(labelled(*hardware))
        if flops.utilization is not None:
            parts.append(Line(units.flops(flops.per_second), "muted"))
    return [heading("work", width, look), *wrap_facts(parts, width)] if parts else []


def _draw_memory(
    state: State, rank: RankSnapshot, row: RankRow, width: int, look: Style
) -> list[Line]:
    """The device as seen from outside, then the rank's own memory by kind."""
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
        "reserved": units.memory(memory.device_reserved_bytes),
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


def _draw_offload(rank: RankSnapshot, width: int, look: Style) -> list[Line]:
    lines = draw_offload(rows_of_rank(rank), width, look)
    return [heading("offload traffic", width, look), *lines] if lines else []


def _unit(value: float | None, unit: str) -> str:
    return units.UNKNOWN if value is None else f"{value:.0f} {unit}"


def _draw_events(state: State, rank: RankSnapshot, width: int, look: Style) -> list[Line]:
    own = tuple(event for event in state.job.events if event.rank == rank.rank)
    rows = event_rows(own)[-_MAX_EVENTS:]
    if not rows:
        return []
    lines = [event_line(row, state, width, look) for row in rows]
    return [heading("its events", width, look), *lines]
