"""What memory is used for, by kind and place, beside what the strategy predicted."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Literal

import msgspec

from boltmesh.telemetry.snapshot import MEMORY_KINDS, MemoryKind, RankSnapshot
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.figures.memo import remember_last
from boltmesh.tui.state import State

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")

TOLERANCE = 0.05
"""A prediction this near is met: allocators round up, and buffers come and go."""

LEAST_DIFFERENCE_BYTES = 2**20
"""What is less than that apart is not worth a word, whatever its share."""

NOT_SPLIT = "not split"
"""The kind of all memory in use, where a rank does not say what it is for."""

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
        """What the measured bytes say of the predicted ones."""
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
    """Of the fullest rank's device, or of its whole host."""
    in_use: int | None
    """Of the limit, by anybody, as whoever watches reads it from outside."""


class MemoryFigures(msgspec.Struct, frozen=True):
    """The memory of a job."""

    rows: tuple[MemoryRow, ...]
    """In the order of places and of MEMORY_KINDS."""
    totals: tuple[PlaceTotal, ...]
    is_split: bool
    """Whether any rank says what its memory is for."""


@remember_last
def memory_figures(state: State) -> MemoryFigures:
    """Return what the ranks hold, where, and what for."""
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
    """Return the memory of a rank that does not say what it is for."""
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
