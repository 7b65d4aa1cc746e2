"""A line for each way between the device, the host and the disk: how much, and how fast."""

from boltmesh.tui import units
from boltmesh.tui.drawing.line import Line, Role
from boltmesh.tui.drawing.look import Look
from boltmesh.tui.drawing.table import Cell, Column, draw_table
from boltmesh.tui.figures.offload import OffloadRow

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


def draw_offload(rows: tuple[OffloadRow, ...], width: int, look: Look) -> list[Line]:
    """A small table with its titles; nothing where nothing is offloaded."""
    if not rows:
        return []
    has_several = any(row.num_ranks > 1 for row in rows)
    cells: list[list[Cell]] = [
        [
            Line(_way(row), "strong"),
            units.traffic(row.per_step),
            _speed(row.bandwidth),
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


def _speed(bandwidth: float | None) -> str:
    return units.UNKNOWN if bandwidth is None else f"{units.traffic(bandwidth)}/s"


def _slowest(row: OffloadRow) -> str:
    return f"rank {row.slowest}, {_speed(row.slowest_bandwidth)}"


def _busy(row: OffloadRow) -> Line:
    if row.busy_share is None:
        return Line(units.UNKNOWN, "muted")
    role: Role = "warn" if row.busy_share >= NEARLY_ALL else "text"
    return Line(f"{units.percent(100 * row.busy_share)} of a step", role)
