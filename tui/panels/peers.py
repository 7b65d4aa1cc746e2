"""Traffic between ranks in one optimizer step, as a matrix: rows send, columns receive.

``draw_axes`` shows the traffic of each axis of the mesh in a step, measured beside expected.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, operator_name
from boltmesh.telemetry.traffic import CONTROL
from boltmesh.tui import units
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.traffic import TrafficRow, axis_size, traffic_rows
from boltmesh.tui.panels.traffic import difference_words, nothing_sent, uncounted_note
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, heading, sentence
from boltmesh.tui.render.table import Cell, Column, draw_table
from boltmesh.tui.state import State

Unit = Literal["rank", "ranks", "stage", "stages"]

Pairs = Mapping[tuple[int, int], float | None]
"""From the sender to the receiver, bytes a step; None: they talk, and the mean is not known yet."""


class PeerMatrix(msgspec.Struct, frozen=True):
    """Rows send, columns receive."""

    unit: Unit
    """Meaning of a row: a rank, several ranks, a pipeline stage, or several stages."""
    labels: tuple[str, ...]
    cells: Pairs
    """By the places of sender and receiver in ``labels``; pairs that do not talk are left out."""

    @property
    def total_bytes(self) -> float | None:
        """The sum over all pairs; None before any of it is known."""
        known = [size for size in self.cells.values() if size is not None]
        return sum(known) if known else None

    @property
    def most_bytes(self) -> float:
        """Those of the pair that moves the most."""
        return max((size for size in self.cells.values() if size is not None), default=0.0)


@remember_last
def rank_pairs(job: JobSnapshot) -> Pairs:
    """Return the bytes that each rank sends to each other one.

    Both sides count the same bytes: the sender is believed, and where it is not seen, because it
    is on another host or ran a version that did not count, the receiver. What ranks agree on is no
    part of it.
    """
    sent: dict[tuple[int, int], float | None] = {}
    received: dict[tuple[int, int], float | None] = {}
    for rank in job.ranks:
        for total in rank.peers:
            # Only outside of steps, to set up; or beside what the model sends.
            if total.bytes_per_step == 0 or total.axis == CONTROL:
                continue
            if total.operator.startswith("send"):
                key, pairs = (rank.rank, total.peer), sent
            else:
                key, pairs = (total.peer, rank.rank), received
            before = pairs.get(key, 0.0)
            size = total.bytes_per_step
            pairs[key] = None if size is None or before is None else before + size
    return received | sent


def peer_matrix(job: JobSnapshot, *, max_rows: int) -> PeerMatrix | None:
    """Return the matrix of at most ``max_rows`` rows, or None if no rank sends to a single one.

    A row is a rank if that fits, else a pipeline stage. If there are still too many, neighbours
    share a row.
    """
    pairs = rank_pairs(job)
    if not pairs or max_rows < 1:
        return None
    ranks = sorted({rank for pair in pairs for rank in pair})
    if len(ranks) <= max_rows:
        return _gather("rank", pairs, {rank: at for at, rank in enumerate(ranks)}, ranks)
    is_pipeline = job.mesh.get("pipeline", 1) > 1
    places = _stages(job, ranks) if is_pipeline else {rank: rank for rank in ranks}
    num_places = max(places.values()) + 1
    if num_places <= max_rows:
        return _gather("stage", pairs, places, range(num_places))
    together = -(-num_places // max_rows)
    labels = [
        f"{first}-{min(first + together, num_places) - 1}"
        for first in range(0, num_places, together)
    ]
    blocks = {rank: place // together for rank, place in places.items()}
    return _gather("stages" if is_pipeline else "ranks", pairs, blocks, labels)


def _stages(job: JobSnapshot, ranks: Sequence[int]) -> dict[int, int]:
    """Return the pipeline stage of each rank; of a rank that says nothing, by the mesh's order."""
    known = {rank.rank: rank.coordinates.get("pipeline") for rank in job.ranks}
    num_stages = max(1, job.mesh.get("pipeline", 1))
    ranks_per_stage = max(1, job.world_size // num_stages)
    return {
        rank: stage if (stage := known.get(rank)) is not None else max(0, rank) // ranks_per_stage
        for rank in ranks
    }


def _gather(
    unit: Unit, pairs: Pairs, places: Mapping[int, int], labels: Sequence[object]
) -> PeerMatrix:
    cells: dict[tuple[int, int], float | None] = {}
    for (sender, receiver), size in pairs.items():
        key = (places[sender], places[receiver])
        before = cells.get(key, 0.0)
        cells[key] = None if size is None or before is None else before + size
    return PeerMatrix(unit, tuple(map(str, labels)), cells)


GAP = 2
CELL_WIDTH = 7
"""``12.3 MB`` and shorter: figures of three digits and a unit."""

_LABEL_WIDTH = 8
_SHADE_WIDTH = 2


def draw_peers(state: State, width: int, height: int, look: Style) -> list[Line]:
    """The matrix with a figure and a shade in each cell; empty if no rank sends to a single one.

    Rows are pipeline stages if there are too many ranks.
    """
    top = int(look.has_headings)
    # A line for the title and one for the receivers; the rest is one line a sender.
    max_rows = min((width - _LABEL_WIDTH) // (_SHADE_WIDTH + CELL_WIDTH + GAP), height - top - 2)
    matrix = peer_matrix(state.job, max_rows=max_rows)
    if matrix is None or len(matrix.labels) < 2:
        whole = peer_matrix(state.job, max_rows=1)
        return [] if whole is None else _in_words(whole, width, height, look)
    lines = _matrix(matrix, width, look)
    title = "point to point, bytes per step from row to column"
    if not look.has_headings:
        return [Line(title, "muted").crop(width), *lines][:height]
    about = Line(units.traffic(matrix.total_bytes), "strong")
    about.add(f" in all, among {_unit_words(matrix)}", "muted")
    return [heading(title, width, look), about.crop(width), *lines][:height]


def _in_words(matrix: PeerMatrix, width: int, height: int, look: Style) -> list[Line]:
    """One sentence, where not even one cell fits."""
    text = f"point to point: {units.traffic(matrix.total_bytes)} per step"
    return sentence(text, width, look, role="muted", max_lines=height)


def _unit_words(matrix: PeerMatrix) -> str:
    count = len(matrix.labels)
    return {
        "rank": f"{count} ranks",
        "ranks": f"{count} runs of ranks, added up",
        "stage": f"{count} pipeline stages, their ranks added up",
        "stages": f"{count} runs of pipeline stages, their ranks added up",
    }[matrix.unit]


def _matrix(matrix: PeerMatrix, width: int, look: Style) -> list[Line]:
    size = max(CELL_WIDTH, *(len(units.traffic(cell)) for cell in matrix.cells.values()))
    word = "rank" if matrix.unit in {"rank", "ranks"} else "stage"
    labels = [f"{word} {label}" for label in matrix.labels]
    label_width = max(map(len, labels))
    header = Line(" " * label_width, "muted")
    for label in labels:
        header.add(" " * GAP).add(label.rjust(_SHADE_WIDTH + size), "muted")
    lines = [header.crop(width)]
    for sender, label in enumerate(labels):
        line = Line(label.ljust(label_width), "muted")
        for receiver in range(len(labels)):
            line.add(" " * GAP).join(_cell(matrix, sender, receiver, size, look))
        lines.append(line.crop(width))
    return lines


def _cell(matrix: PeerMatrix, sender: int, receiver: int, size: int, look: Style) -> Line:
    """A shade by the share of the busiest pair, and the figure; a dot where nothing is sent."""
    if (sender, receiver) not in matrix.cells:
        return Line(look.glyphs.dot.rjust(_SHADE_WIDTH + size), "faint")
    sent = matrix.cells[sender, receiver]
    if sent is None:
        return Line("counting".rjust(_SHADE_WIDTH + size), "muted")
    levels = look.glyphs.levels
    share = sent / matrix.most_bytes if matrix.most_bytes else 0.0
    shade = levels[round(share * (len(levels) - 1))]
    return Line(shade, "chart").add(units.traffic(sent).rjust(size + _SHADE_WIDTH - 1))


class AxisRow(msgspec.Struct, frozen=True, kw_only=True):
    """One axis in one optimizer step, the mean over the ranks that count it."""

    axis: str
    size: int | None
    """Ranks of one of its groups; None if it is no axis of the mesh."""
    operators: tuple[str, ...]
    """That ran on it, those that move the most first."""
    calls: float | None
    payload_bytes: float | None
    expected_bytes: float | None
    """None where the strategy states nothing of it."""
    time_share: float | None
    """Share of the step; None if the ends of operators are not known."""
    byte_share: float | None
    """Share of the payload of all ranks."""
    rows: tuple[TrafficRow, ...]
    """By operator."""

    @property
    def wrong(self) -> tuple[TrafficRow, ...]:
        """The operators that move something else than the strategy says."""
        return tuple(row for row in self.rows if row.is_wrong)


@remember_last
def axis_rows(job: JobSnapshot) -> list[AxisRow]:
    """Return the axes of more than one rank, outermost first, then other traffic.

    An axis without any counts yet is included.
    """
    rows = traffic_rows(job)
    axes = [axis for axis, size in job.mesh.items() if size > 1]
    axes += [row.axis for row in rows]
    return [
        _axis(axis, [row for row in rows if row.axis == axis], job) for axis in dict.fromkeys(axes)
    ]


def rank_bytes(job: JobSnapshot, rank: int | None) -> dict[str, float]:
    """Return the bytes that one rank moves in a step, by axis; unknown values are left out."""
    found: dict[str, float] = {}
    for each in next((each.collectives for each in job.ranks if each.rank == rank), ()):
        if each.bytes_per_step is not None:
            found[each.axis] = found.get(each.axis, 0.0) + each.bytes_per_step
    return found


def _axis(axis: str, rows: Sequence[TrafficRow], job: JobSnapshot) -> AxisRow:
    return AxisRow(
        axis=axis,
        size=axis_size(job, axis),
        operators=tuple(operator_name(row.operator) for row in rows if row.num_ranks),
        calls=_sum(row.calls for row in rows if row.num_ranks),
        payload_bytes=_sum(row.payload_bytes for row in rows if row.num_ranks),
        expected_bytes=_sum(row.expected_bytes for row in rows if row.expected_bytes is not None),
        time_share=_sum(row.time_share for row in rows if row.num_ranks),
        byte_share=_sum(row.byte_share for row in rows if row.num_ranks),
        rows=tuple(rows),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if one part is unknown, or there is no part."""
    total: float | None = None
    for value in values:
        if value is None:
            return None
        total = value if total is None else total + value
    return total


def draw_axes(
    state: State, width: int, height: int, look: Style, *, selected: int | None = None
) -> list[Line]:
    """A line for each axis; the selected rank's own bytes beside the mean of all."""
    lines = [heading("communication by axis, per step", width, look)] if look.has_headings else []
    note = uncounted_note(state, width, look)
    if note is not None:
        return [*lines, note][: max(0, height)]
    rows = axis_rows(state.job)
    if not rows:
        return [*lines, Line(nothing_sent(state), "muted").crop(width)][: max(0, height)]
    own = rank_bytes(state.job, selected)
    has_time = any(row.time_share is not None for row in rows)
    columns = [
        Column("axis"),
        Column("ranks", is_number=True, rank=4),
        Column("calls", is_number=True, rank=5),
        Column("measured", is_number=True),
        Column("expected", is_number=True, rank=1),
        Column(""),
        *([Column(f"rank {selected}", is_number=True, rank=3)] if own else []),
        Column("share of bytes", is_number=True, rank=2),
        *([Column("share of step", is_number=True, rank=3)] if has_time else []),
        Column("operators", rank=7, shrinks_to=12),
    ]
    cells: list[list[Cell]] = [
        [
            row.axis,
            units.count(row.size),
            units.count(None if row.calls is None else round(row.calls, 1)),
            units.traffic(row.payload_bytes),
            Line(units.traffic(row.expected_bytes), "muted"),
            verdict(row, look),
            *([units.traffic(own.get(row.axis))] if own else []),
            units.whole_share(row.byte_share),
            *([units.whole_share(row.time_share)] if has_time else []),
            Line(", ".join(row.operators), "muted"),
        ]
        for row in rows
    ]
    lines += draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    return lines[: max(0, height)]


def verdict(row: AxisRow, look: Style) -> Line:
    """Say whether an axis moves the expected bytes, as a sign and words."""
    wrong = row.wrong
    if wrong:
        words = difference_words(wrong[0]) if len(wrong) == 1 else f"{len(wrong)} operators differ"
        return Line(look.sign(look.glyphs.differs) + words, "bad")
    verdicts = {each.verdict for each in row.rows}
    if "pending" in verdicts:
        return Line("counting", "muted")
    if "equal" in verdicts:
        rest = "" if verdicts == {"equal"} else ", as far as stated"
        return Line(f"{look.sign(look.glyphs.equal)}as expected{rest}", "good")
    return Line("no formula" if row.rows else "nothing yet", "muted")
