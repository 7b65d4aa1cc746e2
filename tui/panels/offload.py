"""Transfers between the device, the host and the disk: a line for each way with its rate."""

from collections.abc import Sequence
from statistics import median

import msgspec

from boltmesh.telemetry.snapshot import OffloadTotal, RankSnapshot
from boltmesh.tui import units
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.step_time import step_seconds
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.style import Style
from boltmesh.tui.render.table import Cell, Column, draw_table
from boltmesh.tui.state import State


class OffloadRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way over all ranks that use it."""

    place: str
    direction: str
    num_ranks: int
    """Number of ranks that have moved anything this way."""
    per_step: float | None
    """Bytes of one rank in one step, the median of the ranks."""
    bandwidth: float | None
    """Bytes a second while anything moves, the median of the ranks."""
    slowest: int | None
    """The rank with the least bandwidth."""
    slowest_bandwidth: float | None
    busy_share: float | None
    """Share of a step's time, of the rank where it is most; hidden behind computation or not."""
    moved_bytes: int
    """Bytes of all ranks since the start."""


@remember_last
def offload_rows(state: State) -> tuple[OffloadRow, ...]:
    """Return every way on which a rank has moved anything, in the order of the ranks' files."""
    return _rows(state.job.ranks)


def rows_of_rank(rank: RankSnapshot) -> tuple[OffloadRow, ...]:
    """Return the same of one rank alone."""
    return _rows((rank,))


def _rows(ranks: Sequence[RankSnapshot]) -> tuple[OffloadRow, ...]:
    by_way: dict[tuple[str, str], list[tuple[RankSnapshot, OffloadTotal]]] = {}
    for rank in ranks:
        for each in rank.offload:
            by_way.setdefault((each.place, each.direction), []).append((rank, each))
    return tuple(_row(*way, entries) for way, entries in by_way.items())


def _row(
    place: str, direction: str, entries: Sequence[tuple[RankSnapshot, OffloadTotal]]
) -> OffloadRow:
    speeds = [
        (each.bytes_per_second, rank.rank)
        for rank, each in entries
        if each.bytes_per_second is not None
    ]
    slowest = min(speeds, default=(None, None))
    shares = [
        each.seconds_per_step / step
        for rank, each in entries
        if each.seconds_per_step is not None and (step := step_seconds(rank))
    ]
    return OffloadRow(
        place=place,
        direction=direction,
        num_ranks=len(entries),
        per_step=_median([each.bytes_per_step for _, each in entries]),
        bandwidth=_median([speed for speed, _ in speeds]),
        slowest=slowest[1],
        slowest_bandwidth=slowest[0],
        busy_share=max(shares, default=None),
        moved_bytes=sum(each.moved_bytes for _, each in entries),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


NEARLY_ALL = 0.9
"""From this share of a step on a way is as good as always busy, and the step waits for it."""

_COLUMNS = (
    Column("offload"),
    Column("a step", is_number=True),
    Column("bandwidth", is_number=True),
    Column("busy", is_number=True, rank=1),
    Column("slowest", rank=2),
    Column("since the start", is_number=True, rank=3),
)


def draw_offload(rows: tuple[OffloadRow, ...], width: int, look: Style) -> list[Line]:
    """A small table with its titles; nothing where nothing is offloaded."""
    if not rows:
        return []
    has_several = any(row.num_ranks > 1 for row in rows)
    cells: list[list[Cell]] = [
        [
            Line(_way(row), "strong"),
            units.traffic(row.per_step),
            units.bandwidth(row.bandwidth),
            _busy(row),
            *([Line("" if row.slowest is None else _slowest(row), "muted")] if has_several else ()),
            Line(units.traffic(row.moved_bytes), "muted"),
        ]
        for row in rows
    ]
    columns = [each for each in _COLUMNS if has_several or each.title != "slowest"]
    return draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)


def _way(row: OffloadRow) -> str:
    return f"{'from' if row.direction == 'read' else 'to'} {row.place}"


def _slowest(row: OffloadRow) -> str:
    return f"rank {row.slowest}, {units.bandwidth(row.slowest_bandwidth)}"


def _busy(row: OffloadRow) -> Line:
    if row.busy_share is None:
        return Line(units.UNKNOWN, "muted")
    role: Role = "warn" if row.busy_share >= NEARLY_ALL else "text"
    return Line(f"{units.percent(100 * row.busy_share)} of a step", role)
