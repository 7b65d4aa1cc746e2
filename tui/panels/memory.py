"""Memory by kind and place, beside the prediction of the strategy.

Stacked bars of the fullest rank, and a line for each kind and place; below them the transfers
between the places, where a part of the training state is offloaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Literal

import msgspec

from boltmesh.telemetry.snapshot import MEMORY_KINDS, MemoryKind, RankSnapshot
from boltmesh.tui import units
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.panels.offload import draw_offload, offload_rows
from boltmesh.tui.render.bars import stack
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.ranks import NEARLY_FULL
from boltmesh.tui.render.style import Style, facts, heading, labelled, sentence, wrap_facts
from boltmesh.tui.render.table import AS_IT_COMES, Cell, Column, browse
from boltmesh.tui.state import State
from boltmesh.tui.view import Cells, TableView, arrange_rows

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")

TOLERANCE = 0.05
"""A prediction this near is met: allocators round up, and buffers come and go."""

LEAST_DIFFERENCE_BYTES = 2**20
"""Smaller differences are not mentioned, whatever their share."""

NOT_SPLIT = "not split"
"""The kind of all memory in use, for a rank that does not report kinds."""

Verdict = Literal["met", "more", "less", "unpredicted", "unmeasured"]

Entry = tuple[int, int | None, int | None]
"""A rank, the bytes that it measured, the bytes that were predicted for it."""


class Spread(msgspec.Struct, frozen=True):
    """How much the ranks have."""

    least: int
    median: int
    most: int
    fullest: int
    """The rank that has the most; of equal ones the first."""


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind in one place."""

    place: Place
    kind: str
    measured: Spread | None
    """Over the ranks that measure it; None where none does."""
    predicted: int | None
    """For the fullest rank; where nothing is measured, the most of any rank. None: the strategy
    does not predict it."""

    @property
    def verdict(self) -> Verdict:
        """Comparison of the measured bytes with the predicted ones."""
        if self.measured is None:
            return "unmeasured"
        if self.predicted is None:
            return "unpredicted"
        difference = self.measured.most - self.predicted
        if abs(difference) <= max(TOLERANCE * self.predicted, LEAST_DIFFERENCE_BYTES):
            return "met"
        return "more" if difference > 0 else "less"


class PlaceTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All kinds of one place together."""

    place: Place
    measured: Spread | None
    parts: Mapping[str, int]
    """The measured kinds of the fullest rank, in the order of MEMORY_KINDS."""
    predicted: Mapping[str, int]
    """The predicted kinds of that rank; empty where nothing is."""
    limit: int | None
    """Bytes of the fullest rank's device, or of its whole host."""
    in_use: int | None
    """Bytes of the limit that all processes use, read from outside."""


class MemoryFigures(msgspec.Struct, frozen=True):
    """The memory of a job."""

    rows: tuple[MemoryRow, ...]
    """Rows in the order of places and of MEMORY_KINDS."""
    totals: tuple[PlaceTotal, ...]
    is_split: bool
    """Whether any rank reports its memory by kind."""


@remember_last
def memory_figures(state: State) -> MemoryFigures:
    """Return the memory of the ranks by place and kind."""
    by_key: dict[tuple[str, str], list[Entry]] = {}
    for rank in state.job.ranks:
        for each in rank.memory_kinds or _whole(rank):
            key = (each.place, each.kind)
            entry = (rank.rank, each.measured_bytes, each.predicted_bytes)
            entries = by_key.get(key)
            if entries is None:
                by_key[key] = [entry]
            else:
                entries.append(entry)
    rows: list[MemoryRow] = []
    totals: list[PlaceTotal] = []
    for place in PLACES:
        kinds = {kind: by_key[place, kind] for kind in _ordered(by_key, place)}
        rows += (_row(place, kind, entries) for kind, entries in kinds.items())
        if kinds:
            totals.append(_total(place, kinds, state))
    is_split = any(rank.memory_kinds for rank in state.job.ranks)
    return MemoryFigures(tuple(rows), tuple(totals), is_split)


def _whole(rank: RankSnapshot) -> tuple[MemoryKind, ...]:
    """Return the memory of a rank that does not report kinds."""
    memory, found = rank.memory, []
    if memory.device_allocated_bytes is not None:
        found.append(MemoryKind(NOT_SPLIT, "device", memory.device_allocated_bytes, None))
        if memory.device_reserved_bytes is not None:
            cache = max(0, memory.device_reserved_bytes - memory.device_allocated_bytes)
            found.append(MemoryKind("cache", "device", cache, None))
    if memory.host_rss_bytes is not None:
        found.append(MemoryKind(NOT_SPLIT, "host", memory.host_rss_bytes, None))
    return tuple(found)


def _ordered(keys: Iterable[tuple[str, str]], place: Place) -> list[str]:
    """Return the kinds of a place; those that this reader has no word for come last."""
    kinds = [kind for where, kind in keys if where == place]
    return sorted(
        kinds,
        key=lambda kind: (
            MEMORY_KINDS.index(kind) if kind in MEMORY_KINDS else len(MEMORY_KINDS),
            kind,
        ),
    )


def _row(place: Place, kind: str, entries: Sequence[Entry]) -> MemoryRow:
    spread = _spread([(rank, measured) for rank, measured, _ in entries if measured is not None])
    known = [(predicted, rank) for rank, _, predicted in entries if predicted is not None]
    if spread is None:
        predicted = max((size for size, _ in known), default=None)
    else:
        predicted = next((size for size, rank in known if rank == spread.fullest), None)
    return MemoryRow(place=place, kind=kind, measured=spread, predicted=predicted)


def _spread(sizes: Sequence[tuple[int, int]]) -> Spread | None:
    if not sizes:
        return None
    ordered = sorted(size for _, size in sizes)
    fullest = next(rank for rank, size in sizes if size == ordered[-1])
    return Spread(ordered[0], median_low(ordered), ordered[-1], fullest)


def _total(place: Place, kinds: Mapping[str, Sequence[Entry]], state: State) -> PlaceTotal:
    sums: dict[int, int] = {}
    for entries in kinds.values():
        for rank, measured, _ in entries:
            if measured is not None:
                sums[rank] = sums.get(rank, 0) + measured
    spread = _spread(list(sums.items()))
    if spread is None:
        of_rank = {rank: size or 0 for rank, _, size in next(iter(kinds.values()))}
        fullest = max(of_rank, key=lambda rank: of_rank[rank])
    else:
        fullest = spread.fullest
    parts: dict[str, int] = {}
    predicted: dict[str, int] = {}
    for kind, entries in kinds.items():
        for rank, size, guess in entries:
            if rank == fullest:
                parts |= {} if size is None else {kind: size}
                predicted |= {} if guess is None else {kind: guess}
    reading = _reading(place, fullest, state)
    return PlaceTotal(
        place=place,
        measured=spread,
        parts=parts,
        predicted=predicted,
        limit=None if reading is None else reading.memory_total_bytes,
        in_use=None if reading is None else reading.memory_used_bytes,
    )


def _reading(place: Place, number: int, state: State) -> DeviceReading | None:
    """Return the reading that knows the limit of a rank's memory in ``place``."""
    rank = next((rank for rank in state.job.ranks if rank.rank == number), None)
    if rank is None:
        return None
    for device in state.devices:
        if place == "device" and device.kind == "gpu" and device.uuid == rank.device_uuid:
            return device
        if place == "host" and device.kind == "host" and number in device.ranks:
            return device
    return None


COLUMNS = ("place", "kind", "min", "median", "max", "max rank", "predicted", "difference")
"""Titles that the table can be sorted by."""

NOT_KNOWN = "not known"

MIN_BAR_WIDTH = 12
_LABEL_WIDTH = len("predicted ")
_MIN_TABLE_LINES = 4

_ROLES: dict[str, Role] = {
    "parameters": "forward",
    "gradients": "backward",
    "optimizer": "optimizer",
    "buffers": "transfer",
    "activations": "data",
    "copies": "bubble",
    "cache": "checkpoint",
    NOT_SPLIT: "chart",
}


def draw_memory(
    state: State, width: int, height: int, look: Style, *, table: TableView = AS_IT_COMES
) -> list[Line]:
    """Bars and table, measured beside predicted, and the unknown values in words."""
    figures = memory_figures(state)
    if not figures.rows:
        top = [heading("memory", width, look)] if look.has_headings else []
        return [*top, Line("no rank has reported its memory yet", "muted").crop(width)][:height]
    rows = shown_memory(state, table)
    notes = _notes(figures, width, look)
    bars = _bars(figures, width, look)
    room = height - int(look.has_headings)
    moved = draw_offload(offload_rows(state), width, look)
    # The table is the whole story: the others stand where it leaves room, each of them whole or
    # not at all, and what is moved before bars that only repeat the table.
    least = max(1, len(rows)) + 1
    needed = min(least, _MIN_TABLE_LINES)
    moved = moved if len(moved) + needed <= room else []
    bars = bars if len(bars) + len(moved) + needed <= room else []
    at_least = least if moved else needed
    notes = notes[: max(0, room - len(bars) - len(moved) - at_least)]
    if moved and len(bars) + least + len(moved) + len(notes) < room:
        moved.insert(0, Line())
    seen = browse(
        _COLUMNS,
        rows,
        lambda row: _cells(row, look),
        width,
        room - 1 - len(bars) - len(moved) - len(notes),
        look,
        table,
    )
    top = [heading("memory", width, look, right=seen.hidden)] if look.has_headings else []
    return [*top, *bars, seen.header, *seen.lines, *notes, *moved][:height]


def shown_memory(state: State, table: TableView) -> list[MemoryRow]:
    """Return the filtered and sorted rows."""
    return arrange_rows(memory_figures(state).rows, cells_of, table)


def cells_of(row: MemoryRow) -> Cells:
    """Return a row as it is filtered and sorted."""
    measured = row.measured
    return {
        "place": row.place,
        "kind": row.kind,
        "min": None if measured is None else measured.least,
        "median": None if measured is None else measured.median,
        "max": None if measured is None else measured.most,
        "max rank": None if measured is None else measured.fullest,
        "predicted": row.predicted,
        "difference": difference_words(row),
    }


def difference_words(row: MemoryRow) -> str:
    """Return how the measured bytes stand to the predicted ones."""
    if row.measured is None:
        return "not measured"
    if row.predicted is None:
        return "not predicted"
    if row.verdict == "met":
        return "as predicted"
    more = abs(row.measured.most - row.predicted)
    share = f"{100 * more / row.predicted:.0f}%" if row.predicted else units.memory(more)
    return f"{share} {row.verdict}"


_COLUMNS = (
    Column("place", rank=2),
    Column("kind"),
    Column("min", is_number=True, rank=6),
    Column("median", is_number=True, rank=5),
    Column("max", is_number=True),
    Column("max rank", rank=4),
    Column("predicted", is_number=True, rank=3),
    Column("difference", rank=1),
)


def _cells(row: MemoryRow, look: Style) -> list[Cell]:
    measured = row.measured
    is_one = measured is not None and measured.least == measured.most
    return [
        row.place,
        Line(look.sign(_pattern(row.kind, look)), _ROLES.get(row.kind, "other")).add(row.kind),
        _size(None if measured is None else measured.least),
        _size(None if measured is None else measured.median),
        _size(None if measured is None else measured.most),
        Line("all equal" if is_one else f"rank {measured.fullest}" if measured else "", "muted"),
        _size(row.predicted, "muted"),
        _difference(row, look),
    ]


def _size(size: int | None, role: Role = "text") -> Line:
    return Line(NOT_KNOWN, "muted") if size is None else Line(units.memory(size), role)


def _difference(row: MemoryRow, look: Style) -> Line:
    words = difference_words(row)
    if row.verdict == "met":
        return Line(look.sign(look.glyphs.equal) + words, "good")
    if row.verdict in {"more", "less"}:
        role: Role = "bad" if row.verdict == "more" else "warn"
        return Line(look.sign(look.glyphs.differs) + words, role)
    return Line(words, "muted")


def _pattern(kind: str, look: Style) -> str:
    patterns = look.glyphs.kinds
    return "#" if kind == NOT_SPLIT else patterns.get(kind, patterns["other"])


def _bars(figures: MemoryFigures, width: int, look: Style) -> list[Line]:
    """For each place a line of figures, and bars of the measured and the predicted kinds."""
    lines: list[Line] = []
    for total in figures.totals:
        kinds = [row.kind for row in figures.rows if row.place == total.place]
        lines.append(_headline(total, kinds, width))
        whole = max(
            sum(total.parts.values()),
            sum(total.predicted.values()),
            total.limit or 0 if total.place == "device" else 0,
        )
        room = width - _LABEL_WIDTH
        if whole <= 0 or room < MIN_BAR_WIDTH:
            continue
        for label, parts in (("measured", total.parts), ("predicted", total.predicted)):
            if parts:
                bar = _bar(parts, whole, room, look)
                lines.append(Line(label.ljust(_LABEL_WIDTH), "muted").join(bar))
    return [*lines, *_legend(figures, width, look)]


def _headline(total: PlaceTotal, kinds: Sequence[str], width: int) -> Line:
    """``device   fullest, rank 5, 58.2 GiB   the device 61.0 of 79.6 GiB in use, 77%   ...``."""
    measured = total.measured
    parts = [Line(total.place, "strong")]
    if measured is None:
        parts.append(Line("not measured", "muted"))
    elif measured.least == measured.most:
        parts.append(labelled("each rank", units.memory(measured.most), "strong"))
    else:
        fullest = f"max, rank {measured.fullest},"
        parts.append(labelled(fullest, units.memory(measured.most), "strong"))
    parts.append(_limit(total))
    if total.predicted:
        predicted = labelled("predicted", units.memory(sum(total.predicted.values())))
        if missing := [kind for kind in kinds if kind not in total.predicted]:
            predicted.add(f" without {', '.join(missing)}", "muted")
        parts.append(predicted)
    if measured is not None and measured.least != measured.most:
        parts.append(labelled("median", units.memory(measured.median)))
        parts.append(labelled("min", units.memory(measured.least)))
    return facts(parts, width) if parts[0].width <= width else parts[0].crop(width)


def _limit(total: PlaceTotal) -> Line:
    """Memory of the device or the host, and how much all processes use."""
    if total.place == "disk":
        return Line()
    if not total.limit:
        return Line("limit not known", "muted")
    name = "the device" if total.place == "device" else "its host"
    if total.in_use is None:
        return labelled(f"{name} has", units.memory(total.limit))
    share = total.in_use / total.limit
    role: Role = "warn" if share >= NEARLY_FULL else "text"
    text = f"{units.memory(total.in_use)} of {units.memory(total.limit)} in use"
    nearly = ", nearly full" if share >= NEARLY_FULL else ""
    return labelled(name, f"{text}, {units.percent(100 * share)}{nearly}", role)


def _bar(parts: Mapping[str, int], whole: int, width: int, look: Style) -> Line:
    found = [
        (float(size), _pattern(kind, look), _ROLES.get(kind, "other"))
        for kind, size in parts.items()
    ]
    cells = round(sum(parts.values()) / whole * width)
    return stack(found, cells).pad_to(width, look.glyphs.bar_rest, "faint")


def _legend(figures: MemoryFigures, width: int, look: Style) -> list[Line]:
    # The table repeats the patterns, so a legend is only needed where that has no signs.
    if look.has_signs:
        return [Line()]
    kinds = dict.fromkeys(row.kind for row in figures.rows)
    return wrap_facts(
        [
            Line(_pattern(kind, look), _ROLES.get(kind, "other")).add(f" {kind}", "muted")
            for kind in kinds
        ],
        width,
        gap=2,
    )


def _notes(figures: MemoryFigures, width: int, look: Style) -> list[Line]:
    """Name the unknown values, with the reasons."""
    texts = []
    if not figures.is_split:
        texts.append("by kind: not known: no rank says what its memory is for")
    for place in dict.fromkeys(row.place for row in figures.rows):
        rows = [row for row in figures.rows if row.place == place and row.kind != NOT_SPLIT]
        silent = [row.kind for row in rows if row.verdict == "unpredicted"]
        unmeasured = [row.kind for row in rows if row.verdict == "unmeasured"]
        if silent:
            texts.append(
                f"{', '.join(silent)} ({place}), predicted: not known: "
                "the strategy does not predict it"
            )
        if unmeasured:
            texts.append(
                f"{', '.join(unmeasured)} ({place}), measured: not known: no rank measures it"
            )
    return [
        line for text in texts for line in sentence(text, width, look, role="muted", max_lines=2)
    ]
