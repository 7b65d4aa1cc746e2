"""Load of the experts of each layer as a heat map, with its imbalance."""

from collections.abc import Sequence

from boltmesh.tui import units
from boltmesh.tui.metrics.experts import LayerLoad, layer_loads
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, facts, heading
from boltmesh.tui.render.table import AS_IT_COMES, GAP, Column, browse
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

EXPERT_COLUMNS = ("module", "max/mean", "min/mean", "idle", "dropped", "rows")
"""Titles that the table can be sorted by."""

LEAST_MAP = 8
MOST_MODULE = 32
_FIGURE = 6
"""Cells of a shade with its figure, and a blank: `` 0.97``."""
_SHADES = 2
"""Cells of a shade alone, at most; a terminal's cells are twice as high as wide."""


def shown_experts(state: State, table: TableView) -> list[LayerLoad]:
    """Return the filtered and sorted modules."""
    return arrange_rows(layer_loads(state.job), _cells, table)


def _cells(load: LayerLoad) -> Cells:
    return {
        "module": load.module,
        "max/mean": load.imbalance,
        "min/mean": load.least,
        "idle": load.num_idle,
        "dropped": load.dropped_share,
        "rows": sum(load.rows),
    }


def draw_experts(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """A row for each module: the heat map of its experts, then figures."""
    shown = shown_experts(state, table)
    before, names, behind = split_names([load.module for load in layer_loads(state.job)])
    longest = min(MOST_MODULE, max(map(len, names.values()), default=0))
    num_experts = max((len(load.recent) for load in shown), default=1)
    has_dropped = any(load.dropped for load in shown)
    title = f"experts 0 to {num_experts - 1}"
    numbers = {
        "max/mean": [_times(load.imbalance) for load in shown],
        "min/mean": [_times(load.least) for load in shown],
        "idle": [str(load.num_idle) for load in shown],
        **({"dropped": [units.share(load.dropped_share) for load in shown]} if has_dropped else {}),
        "rows": [units.count(sum(load.rows)) for load in shown],
    }
    taken = sum(max(map(len, (name, *column))) + GAP for name, column in numbers.items())
    room = max(LEAST_MAP, width - max(longest, len("module")) - GAP - taken)
    columns = [
        Column("module", shrinks_to=12),
        Column(title),
        *(Column(name, is_number=True, rank=_RANKS.get(name, 0)) for name in numbers),
    ]
    cells = {
        load.module: [column[place] for column in numbers.values()]
        for place, load in enumerate(shown)
    }
    top = int(look.has_headings)
    seen = browse(
        columns,
        shown,
        lambda load: [
            names[load.module],
            _heat(load, room, num_experts, look),
            *cells[load.module],
        ],
        width,
        height - top - 3,
        look,
        table,
    )
    lines = [seen.header, *seen.lines]
    if top:
        parts = f"{before}*{behind}" if len(names) > 1 else next(iter(names.values()), "")
        about = f"rows by expert of {parts}"
        lines.insert(0, heading(about, width, look, right=seen.hidden))
    lines += [Line(), _legend(look, shown, width)]
    return lines[:height]


_RANKS = {"rows": 2, "min/mean": 1}
"""All rows of a module are those of the others; the least matters less than the most."""


def split_names(modules: Sequence[str]) -> tuple[str, dict[str, str], str]:
    """Return the common beginning of all names, the parts that differ, and the common end.

    The last part of the beginning stays with the names: ``layers.0``, not ``0``.
    """
    parts = [name.split(".") for name in modules]
    if len(set(modules)) < 2:
        return "", {name: name for name in modules}, ""
    shortest = min(map(len, parts))
    head = next((at for at in range(shortest) if len({each[at] for each in parts}) > 1), shortest)
    rest = shortest - head
    tail = next((at for at in range(rest) if len({each[-1 - at] for each in parts}) > 1), rest)
    kept = max(0, head - 1)
    names = {
        name: ".".join(each[kept : len(each) - tail])
        for name, each in zip(modules, parts, strict=True)
    }
    first = parts[0]
    return (
        "".join(f"{each}." for each in first[:head]),
        names,
        "".join(f".{each}" for each in first[len(first) - tail :]),
    )


def _times(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:.2f}"


def _heat(load: LayerLoad, room: int, num_experts: int, look: Style) -> Line:
    """Draw a shade for each expert, with its figure where there is room; or for several one."""
    each = room // num_experts
    if each >= _FIGURE:
        line = Line()
        for rows in load.recent:
            line.add(*look.shade(_level([rows], load.mean)))
            line.add(_times(rows / load.mean if load.mean else None).ljust(_FIGURE - 1))
        return line
    every = -(-num_experts // room)
    line = Line()
    for first in range(0, len(load.recent), every):
        sign, role = look.shade(_level(load.recent[first:][:every], load.mean))
        line.add(sign * max(1, min(_SHADES, each)), role)
    return line


def _level(rows: Sequence[int], mean: float) -> float:
    """Return 0.5 for an even load, 1 for twice as much and more."""
    return min(1.0, max(rows) / mean / 2) if mean else 0.0


def _legend(look: Style, loads: Sequence[LayerLoad], width: int) -> Line:
    scale = Line("rows over the mean  ", "muted")
    for text, level in (("0 ", 0.0), ("  half ", 0.25), ("  even ", 0.5), ("  2x ", 1.0)):
        scale.add(text, "muted").add(*look.shade(level))
    dropped, rows = (sum(each.dropped for each in loads), sum(sum(each.rows) for each in loads))
    if rows and dropped:
        lost = Line(f"{dropped / rows:.1%} of rows dropped", "warn")
    else:
        lost = Line("no row is dropped", "muted")
    return facts([scale, lost], width)
