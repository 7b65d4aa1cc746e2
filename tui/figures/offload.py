"""What ranks move between their device, their host and their disk: a line for each way."""

from collections.abc import Sequence
from statistics import median

import msgspec

from boltmesh.telemetry.snapshot import OffloadTotal, RankSnapshot
from boltmesh.tui.figures.memo import remember_last
from boltmesh.tui.figures.step_time import step_seconds
from boltmesh.tui.state import State


class OffloadRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way over all ranks that use it."""

    place: str
    direction: str
    num_ranks: int
    """Those that have moved anything on it."""
    per_step: float | None
    """Bytes of one rank in one step, the median of the ranks."""
    bandwidth: float | None
    """Bytes a second while anything moves, the median of the ranks."""
    slowest: int | None
    """The rank with the least bandwidth."""
    slowest_bandwidth: float | None
    busy_share: float | None
    """Of a step's time, of the rank where it is most; hidden behind computation or not."""
    moved_bytes: int
    """Of all ranks since the start."""


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
