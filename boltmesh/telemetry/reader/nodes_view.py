"""Fills in the ranks of other hosts from the summaries that this host received.

[Note: When a host is not heard of]
Silence means something only while this host listens. It listens at the end of its steps, so when
no step ends here either, in a long validation or a collective that does not come back, the last
summary stays: a rank there is as it was, and its ``last_seen`` gives its age. When steps
go on here and nothing comes from there, or no rank here is left to listen, its ranks become
missing, with the reason. Times are compared on this host's clock only.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.job import open_private
from boltmesh.telemetry.reader.file_records import MAX_NUMBER, is_time
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import (
    PHASES,
    CollectiveInFlight,
    GroupProgress,
    Memory,
    RankSnapshot,
)
from boltmesh.telemetry.writer.nodes import (
    NODES_FILE,
    VERSION,
    NodeSummary,
    RankSummary,
    ReceivedNode,
    ReceivedNodes,
)

SILENT_S: Final = 30.0
"""A host that has missed three of its turns, and this long on top, counts as silent."""
_CLOCKS_APART_S: Final = 5.0
"""Clocks that differ by less are taken as they are."""
_MAX_FILE_BYTES: Final = 16 << 20
_MAX_GROUPS: Final = 64

_NO_MEMORY: Final = Memory(None, None, None, None)


class _RemoteRank(NamedTuple):
    """A rank as its own host described it, and when that came."""

    rank: RankSnapshot
    received: float
    patience_s: float


class NodesView:
    """The ranks of other hosts by the files of a job's folder, looked at again and again.

    Args:
        path: The job's folder.
        clock: Wall clock.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path / NODES_FILE
        self._clock = clock
        self._stamp: tuple[int, int, int] | None = None
        self._heard: ReceivedNodes | None = None
        self._elsewhere: dict[int, _RemoteRank] = {}
        self._offsets_s: dict[str, float] = {}
        """Our clock minus that of a host, or a little more."""

    def fill(self, ranks: Sequence[RankSnapshot]) -> tuple[RankSnapshot, ...]:
        """Return the ranks of a job, those without a file here as their own host described them."""
        self._read(len(ranks))
        if self._heard is None or not self._elsewhere:
            return tuple(ranks)
        here = [rank for rank in ranks if rank.state != "missing"]
        return tuple(
            self._show(each, here)
            if rank.state == "missing"
            and rank.error is None
            and (each := self._elsewhere.get(rank.rank)) is not None
            else rank
            for rank in ranks
        )

    def _show(self, each: _RemoteRank, here: Sequence[RankSnapshot]) -> RankSnapshot:
        """Return a rank as it was described, or why that no longer holds."""
        rank = each.rank
        if not rank.is_alive:
            return rank
        reason = self._silence(each, here)
        if reason is None:
            return rank
        return msgspec.structs.replace(
            rank,
            state="missing",
            samples_per_second=None,
            tokens_per_second=None,
            error=clean(f"{rank.host} {reason}"),
        )

    def _silence(self, each: _RemoteRank, here: Sequence[RankSnapshot]) -> str | None:
        """See [Note: When a host is not heard of]."""
        heard = self._heard
        assert heard is not None
        age_s = max(0.0, self._clock() - each.received)
        if not any(rank.is_alive for rank in here):
            return "is not heard of since the ranks here have ended."
        if heard.looked - each.received > each.patience_s:
            return f"is not heard of for {age_s:.0f} s."
        moved = max((rank.last_seen for rank in here), default=0.0)
        patience_s = SILENT_S + 3 * heard.interval_s
        if moved - heard.looked > patience_s:
            why = heard.note or "no rank here exchanges summaries"
            return f"is not heard of for {age_s:.0f} s: {why}."
        return None

    def _read(self, world_size: int) -> None:
        """Read the file again if it was replaced; keep the last content if it is missing."""
        try:
            found = os.lstat(self._path)
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if stamp == self._stamp:
                return
            with open(open_private(self._path), "rb") as file:
                content = file.read(_MAX_FILE_BYTES)
            heard = msgspec.msgpack.decode(content, type=ReceivedNodes)
        except FileNotFoundError:
            if self._stamp is not None and not self._path.parent.exists():
                return  # a cleaner took all of it: what was read stays true
            self._stamp, self._heard, self._elsewhere = None, None, {}  # a new run of the same id
            return
        except (OSError, TelemetryError, msgspec.MsgspecError, RecursionError, ValueError):
            return
        self._stamp = stamp
        if heard.version != VERSION or not (is_time(heard.looked) and _is_sane(heard.interval_s)):
            return
        self._heard = heard
        self._elsewhere = {}
        for node in heard.nodes:
            self._add(node, world_size)

    def _add(self, node: ReceivedNode, world_size: int) -> None:
        try:
            summary = msgspec.msgpack.decode(node.content, type=NodeSummary)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return
        times = (summary.time, node.received)
        if summary.version != VERSION or not all(is_time(each) for each in times):
            return
        if not _is_sane(summary.interval_s):
            return
        # A late summary looks as if the clocks were apart; the least difference that was ever seen
        # of a host has the least of the way in it.
        known_s = self._offsets_s.get(summary.host, math.inf)
        offset_s = self._offsets_s[summary.host] = min(node.received - summary.time, known_s)
        shift_s = offset_s if abs(offset_s) > _CLOCKS_APART_S else 0.0
        patience_s = SILENT_S + 3 * summary.interval_s
        for rank in summary.ranks:
            known = self._elsewhere.get(rank.rank)
            is_newer = known is None or known.received < node.received
            if 0 <= rank.rank < world_size and is_newer and _is_possible(rank):
                described = _snapshot(rank, clean(summary.host, 100), shift_s)
                self._elsewhere[rank.rank] = _RemoteRank(described, node.received, patience_s)


def _snapshot(rank: RankSummary, host: str, shift_s: float) -> RankSnapshot:
    waiting = rank.in_flight
    return RankSnapshot(
        rank=rank.rank,
        pid=rank.pid,
        host=host,
        device=clean(rank.device, 100),
        device_uuid=clean(rank.device_uuid, 100) if rank.device_uuid else None,
        state=rank.state,
        coordinates={clean(axis, 40): at for axis, at in list(rank.coordinates.items())[:8]},
        phase=rank.phase if rank.phase in PHASES else None,
        global_step=rank.global_step,
        epoch=rank.epoch,
        last_seen=max(0.0, rank.last_seen + shift_s),
        steps=(),
        samples_per_second=rank.samples_per_second,
        tokens_per_second=rank.tokens_per_second,
        memory=rank.memory or _NO_MEMORY,
        collectives=(),
        in_flight=(
            CollectiveInFlight(
                axis=clean(waiting.axis, 40),
                operator=clean(waiting.operator, 60),
                sequence=waiting.sequence,
                is_done=waiting.is_done,
            )
            if waiting is not None
            else None
        ),
        error=clean(rank.error) if rank.error else None,
        groups=tuple(
            GroupProgress(
                axis=clean(group.axis, 40),
                group=clean(group.group, 100),
                ranks=(),
                sequence=group.sequence,
                operator=clean(group.operator, 60) if group.operator else None,
                is_done=group.is_done,
                time=None if group.time is None else max(0.0, group.time + shift_s),
            )
            for group in rank.groups[:_MAX_GROUPS]
        ),
        is_summary=True,
    )


def _is_possible(rank: RankSummary) -> bool:
    """Tell whether the numbers of a summary are such as a rank can have."""
    memory = msgspec.structs.astuple(rank.memory) if rank.memory is not None else ()
    counts = (
        rank.pid,
        rank.global_step,
        rank.epoch,
        *memory,
        *rank.coordinates.values(),
        *(group.sequence for group in rank.groups),
        rank.in_flight.sequence if rank.in_flight is not None else None,
    )
    return (
        all(each is None or 0 <= each <= MAX_NUMBER for each in counts)
        and all(
            each is None or _is_sane(each)
            for each in (
                rank.samples_per_second,
                rank.tokens_per_second,
            )
        )
        and is_time(rank.last_seen)
        and all(group.time is None or is_time(group.time) for group in rank.groups)
    )


def _is_sane(number: float) -> bool:
    return math.isfinite(number) and 0 <= number <= MAX_NUMBER
