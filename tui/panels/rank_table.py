"""One line for each rank: how long its steps take, where, whether it is late and why."""

from collections.abc import Iterable, Sequence
from statistics import median

from boltmesh.axes import AXES
from boltmesh.telemetry.snapshot import PHASES, PhaseTime, RankSnapshot
from boltmesh.tui import units
from boltmesh.tui.metrics.ranks import RankRow, rank_rows
from boltmesh.tui.metrics.step_time import SPLIT_PHASES, RankProfile
from boltmesh.tui.metrics.stragglers import Lateness
from boltmesh.tui.render.bars import sparkline, stacked_bar
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.ranks import NEARLY_FULL, rank_phase, rank_state, split_device
from boltmesh.tui.render.style import Style, facts, heading, labelled
from boltmesh.tui.render.table import AS_IT_COMES, Cell, Column, browse
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

COLUMNS = (
    "rank",
    *AXES,
    "host",
    "device",
    "state",
    "phase",
    "step time",
    "slower",
    "cause",
    "waits",
    "behind",
    "util",
    "memory",
    "temp",
    "tokens/s",
    "loss",
)
"""Titles that the table can be sorted by. Times count in milliseconds, shares in percent."""

SPARK_WIDTH = 16
SPLIT_WIDTH = 16

MANY_RANKS = 8
"""From here on ranks in trouble stand before the others where no column sorts: they may not all be
in sight."""

_IN_ORDER = frozenset({"running", "starting", "finished"})


def draw_rank_table(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """The ranks that the filter leaves, sorted, from the first that is scrolled to."""
    rows = shown_ranks(state, table)
    total = len(state.job.ranks)
    top = int(look.has_headings)
    columns = _columns(state)
    ranks = {rank.rank: rank for rank in state.job.ranks}
    seen = browse(
        columns,
        rows,
        lambda row: _cells(row, ranks[row.rank], columns, look),
        width,
        height - top - 1,
        look,
        table,
    )
    lines = [seen.header, *seen.lines]
    if not total:
        lines.append(Line("no ranks yet", "muted").crop(width))
    if look.has_headings:
        about = seen.hidden
        if len(rows) < total:
            gap = "  " if about.width else ""
            about = Line(f"{len(rows)} of {total}{gap}", "muted").join(about)
        lines.insert(0, heading("ranks", width, look, right=about))
    return lines[: max(0, height)]


def shown_ranks(state: State, table: TableView) -> list[RankRow]:
    """Return the rows in the order in which they are drawn, which ``TableView.selected`` counts."""
    rows = rank_rows(state)
    if table.sort is None and len(state.job.ranks) >= MANY_RANKS:
        rows = sorted(rows, key=lambda row: (row.state in _IN_ORDER, not _is_late(row)))
    return arrange_rows(rows, cells_of, table)


def cells_of(row: RankRow) -> Cells:
    """Return a row as it is filtered and sorted."""
    late, profile = row.lateness, row.profile
    return {
        "rank": row.rank,
        **{axis: row.coordinates.get(axis) for axis in AXES},
        "host": row.host,
        "device": row.device,
        "state": row.state,
        "phase": row.phase,
        "step time": None if row.step_s is None else 1e3 * row.step_s,
        "slower": None if late is None else 100 * late.share,
        "cause": cause_words(row),
        "waits": None if profile is None else 1e3 * profile.phases.get("communication", 0.0),
        "behind": row.behind,
        "util": row.utilization_percent,
        "memory": row.memory_used_bytes if row.memory_share is None else 100 * row.memory_share,
        "temp": row.temperature_celsius,
        "tokens/s": row.tokens_per_second,
        "loss": row.loss,
    }


def cause_words(row: RankRow) -> str | None:
    """Return why a rank is in trouble: its own error, else the phase that makes it late."""
    if row.error:
        return row.error
    late = row.lateness
    if late is None or not late.is_late:
        return None
    if late.phase is None:
        return f"several phases +{units.seconds(late.excess_s)}"
    return f"{late.phase} +{units.seconds(late.phase_s - late.phase_peers_s)}"


def draw_spread(state: State, width: int, look: Style) -> list[Line]:
    """Minimum, median and maximum over the ranks: compute time, utilisation, memory."""
    rows = rank_rows(state)
    found = (
        ("compute", [row.compute_s for row in rows if row.compute_s is not None], units.seconds),
        ("util", _known(row.utilization_percent for row in rows), units.percent),
        ("memory", _known(row.memory_used_bytes for row in rows), units.memory),
    )
    parts = [
        labelled(name, "/".join(_share_units([write(value) for value in _three(values)])))
        for name, values, write in found
        if values
    ]
    if len(rows) < 2 or not parts:
        return []
    return [facts([Line("min/median/max", "muted"), *parts], width)]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), median(values), max(values)


def _share_units(texts: Sequence[str]) -> list[str]:
    """Write a unit once if all of the texts have the same."""
    unit = texts[-1].lstrip("0123456789.,-")
    if not unit or not all(text.endswith(unit) for text in texts):
        return list(texts)
    return [*(text.removesuffix(unit) for text in texts[:-1]), texts[-1]]


def _is_late(row: RankRow) -> bool:
    return row.lateness is not None and row.lateness.is_late


def _columns(state: State) -> list[Column]:
    """Return the columns that can have a figure in this job; the others are left out."""
    rows = rank_rows(state)
    axes = [axis for axis, size in state.job.mesh.items() if size > 1 and axis in AXES]
    if len(axes) < 2:  # on one axis the coordinate is the rank itself
        axes = []
    has = {
        "host": len({row.host for row in rows}) > 1,
        "slower": any(row.lateness is not None for row in rows),
        "cause": any(cause_words(row) for row in rows),
        "waits": any(row.profile and "communication" in row.profile.phases for row in rows),
        "behind": any(row.behind for row in rows),
        "util": state.job.state == "running"
        or any(row.utilization_percent is not None for row in rows),
        "temp": any(row.temperature_celsius is not None for row in rows),
        "tokens/s": any(row.tokens_per_second is not None for row in rows),
    }
    columns = [
        Column("rank", is_number=True),
        *(Column(axis, is_number=True, rank=6) for axis in axes),
        Column("host", rank=8, shrinks_to=8),
        Column("device", rank=10, shrinks_to=6),
        Column("state", steady_width=9),
        Column("phase", rank=7, steady_width=2 + max(map(len, PHASES))),
        Column("step time", is_number=True, steady_width=7),
        Column("recent steps", rank=3, steady_width=SPARK_WIDTH),
        Column("split", rank=4, steady_width=SPLIT_WIDTH),
        Column("waits", is_number=True, rank=9, steady_width=7),
        Column("slower", is_number=True, rank=1, steady_width=5),
        Column("cause", rank=2, shrinks_to=30),
        Column("behind", is_number=True, rank=3),
        Column("util", is_number=True, rank=2, steady_width=4),
        Column("memory", is_number=True, rank=3),
        Column("temp", is_number=True, rank=11),
        Column("tokens/s", is_number=True, rank=11, steady_width=7),
        Column("loss", is_number=True, rank=5, steady_width=6),
    ]
    return [column for column in columns if has.get(column.title, True)]


def _cells(row: RankRow, rank: RankSnapshot, columns: list[Column], look: Style) -> list[Cell]:
    drawn: dict[str, Cell] = {
        "rank": str(row.rank),
        **{axis: units.count(row.coordinates.get(axis)) for axis in AXES},
        "host": row.host,
        "device": split_device(row.device)[0],
        "state": rank_state(row.state, look),
        "phase": rank_phase(row.phase, look),
        "step time": units.seconds(row.step_s),
        "recent steps": sparkline(
            [step.seconds for step in rank.steps[-SPARK_WIDTH:]], SPARK_WIDTH, look.glyphs
        ),
        "split": _split(row.profile, look),
        "waits": _waits(row.profile),
        "slower": late_share(row.lateness, look),
        "cause": _cause(row),
        "behind": _behind(row),
        "util": units.percent(row.utilization_percent),
        "memory": _memory(row),
        "temp": units.celsius(row.temperature_celsius),
        "tokens/s": units.rate(row.tokens_per_second),
        "loss": units.number(row.loss),
    }
    return [drawn[column.title] for column in columns]


def late_share(late: Lateness | None, look: Style) -> Line:
    """How much longer a rank takes than its peers, with a sign before an excess."""
    if late is None:
        return Line(units.UNKNOWN, "muted")
    percent = 100 * late.share
    # Beside peers that take next to no time the share is unbounded, beyond a float's range.
    text = "0%" if abs(percent) <= 0.5 else f"{percent:+.0f}%"
    return Line(look.sign("!") + text, "warn") if late.is_late else Line(text, "muted")


def _split(profile: RankProfile | None, look: Style) -> Line:
    if profile is None:
        return Line(units.UNKNOWN, "muted")
    phases = [
        PhaseTime(name, profile.phases[name]) for name in SPLIT_PHASES if name in profile.phases
    ]
    return stacked_bar(phases, SPLIT_WIDTH, look.glyphs)


def _waits(profile: RankProfile | None) -> str:
    return units.seconds(None if profile is None else profile.phases.get("communication", 0.0))


def _cause(row: RankRow) -> Line:
    role: Role = "bad" if row.error else "warn"
    return Line(cause_words(row) or "", role)


def _behind(row: RankRow) -> Line:
    return Line(units.count(row.behind), "warn" if row.behind > 1 else "text")


def _memory(row: RankRow) -> Line:
    share = row.memory_share
    if share is None:
        return Line(units.memory(row.memory_used_bytes))
    role: Role = "warn" if share >= NEARLY_FULL else "text"
    return Line(units.percent(100 * share), role)
