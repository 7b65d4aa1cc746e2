"""Load of the experts of each layer as a heat map, with its imbalance."""

from collections.abc import Sequence

from boltmesh.tui import units
from boltmesh.tui.metrics.experts import LayerLoad, layer_loads
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.style import Style, heading
from boltmesh.tui.render.table import AS_IT_COMES, Column, browse
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

EXPERT_COLUMNS = ("module", "max/mean", "min/mean", "idle", "rows")
"""Titles that the table can be sorted by."""

_ROLES: tuple[Role, ...] = ("heat1", "heat2", "heat3", "heat4", "heat5")
LEAST_MAP = 8
MOST_MODULE = 32
_OTHER_COLUMNS = 42
"""Cells of the columns of numbers."""


def shown_experts(state: State, table: TableView) -> list[LayerLoad]:
    """Return the filtered and sorted modules."""
    return arrange_rows(layer_loads(state.job), _cells, table)


def _cells(load: LayerLoad) -> Cells:
    return {
        "module": load.module,
        "max/mean": load.imbalance,
        "min/mean": load.least,
        "idle": load.num_idle,
        "rows": sum(load.rows),
    }


def draw_experts(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """A row for each module: the heat map of its experts, then figures."""
    shown = shown_experts(state, table)
    longest = min(MOST_MODULE, max((len(load.module) for load in shown), default=0))
    num_experts = max((len(load.recent) for load in shown), default=1)
    room = max(LEAST_MAP, width - longest - _OTHER_COLUMNS)
    columns = [
        Column("module", shrinks_to=12),
        Column(f"experts 0 to {num_experts - 1}"),
        Column("max/mean", is_number=True),
        Column("min/mean", is_number=True),
        Column("idle", is_number=True),
        Column("rows", is_number=True),
    ]
    top = int(look.has_headings)
    seen = browse(
        columns,
        shown,
        lambda load: [
            load.module,
            _heat(load, room, look),
            _times(load.imbalance),
            _times(load.least),
            str(load.num_idle),
            units.count(sum(load.rows)),
        ],
        width,
        height - top - 3,
        look,
        table,
    )
    lines = [seen.header, *seen.lines]
    if top:
        lines.insert(0, heading("rows by expert", width, look, right=seen.hidden))
    lines += [Line(), _legend(look, shown).crop(width)]
    return lines[:height]


def _times(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:.2f}"


def _heat(load: LayerLoad, room: int, look: Style) -> Line:
    """Draw a cell for each expert, or for the most loaded one of several."""
    every = -(-len(load.recent) // room)
    line = Line()
    for first in range(0, len(load.recent), every):
        line.add(*_shade(_level(load.recent[first:][:every], load.mean), look))
    return line


def _level(rows: Sequence[int], mean: float) -> float:
    """Return 0.5 for an even load, 1 for twice as much and more."""
    return min(1.0, max(rows) / mean / 2) if mean else 0.0


def _shade(level: float, look: Style) -> tuple[str, Role]:
    shades = look.glyphs.shades
    return (
        shades[min(len(shades) - 1, int(level * len(shades)))],
        _ROLES[min(len(_ROLES) - 1, int(level * len(_ROLES)))],
    )


def _legend(look: Style, loads: Sequence[LayerLoad]) -> Line:
    line = Line("rows over the mean:  ", "muted")
    for text, level in (("0 ", 0.0), ("  half ", 0.25), ("  even ", 0.5), ("  2x ", 1.0)):
        line.add(text, "muted").add(*_shade(level, look))
    dropped, rows = (sum(each.dropped for each in loads), sum(sum(each.rows) for each in loads))
    if rows and dropped:
        return line.add(f"    {dropped / rows:.1%} of the rows dropped: experts were full", "warn")
    return line.add("    no row is dropped: each is sent to its experts", "muted")
