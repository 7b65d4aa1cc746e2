"""What one rank exchanges with others: how far it is in each group, and what a step moves."""

from boltmesh.telemetry.snapshot import RankSnapshot
from boltmesh.tui import units
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look, heading
from boltmesh.tui.drawing.table import Cell, Column, draw_table
from boltmesh.tui.state import State

_MAX_PEERS = 8


def draw_groups(state: State, rank: RankSnapshot, width: int, look: Look) -> list[Line]:
    """The collective that the rank entered last in each group, and whether it is through."""
    entered = [group for group in rank.groups if group.sequence]
    if not entered and rank.in_flight is None:
        return []
    columns = [
        Column("axis"),
        Column("ranks", rank=2, shrinks_to=8),
        Column("number", is_number=True),
        Column("last entered", shrinks_to=9),
        Column(""),
        Column("since", is_number=True, rank=1),
    ]
    cells: list[list[Cell]] = [
        [
            group.axis,
            units.ranks(group.ranks).removeprefix("ranks ") if group.ranks else units.UNKNOWN,
            units.count(group.sequence),
            (group.operator or units.UNKNOWN).strip("_"),
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
                newest.operator.strip("_"),
                _done(newest.is_done, look),
                units.UNKNOWN,
            ]
        ]
    table = draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    return [heading("collectives", width, look), *table]


def draw_rank_traffic(rank: RankSnapshot, width: int, look: Look) -> list[Line]:
    """What this rank moves in a step: by operator, and by peer where it talks to single ones."""
    # What ran only outside of steps, to set up or to save, is no part of a step.
    moved = [total for total in rank.collectives if total.calls_per_step != 0]
    if not moved and not rank.peers:
        return []
    columns = [
        Column("axis"),
        Column("operator", shrinks_to=9),
        Column("calls", is_number=True, rank=1),
        Column("payload", is_number=True),
        Column("time", is_number=True, rank=3),
        Column("since the start", is_number=True, rank=2),
    ]
    cells: list[list[Cell]] = [
        [
            total.axis,
            total.operator.strip("_"),
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


def _done(is_done: bool | None, look: Look) -> Line:
    if is_done is None:
        return Line("not told", "muted")
    if is_done:
        return Line(look.sign(look.glyphs.finished) + "done", "good")
    return Line(look.sign("!") + "inside", "warn")


def _since(state: State, time: float | None) -> str:
    if time is None:
        return units.UNKNOWN
    now = state.time if state.job.state == "running" else state.job.updated
    seconds = max(0.0, now - time)
    return units.seconds(seconds) if seconds < 1 else units.duration(seconds)
