"""Turns what a rank counted of its collectives into what a snapshot says of them."""

from typing import NamedTuple

from boltmesh.telemetry import layout
from boltmesh.telemetry.layout import Header
from boltmesh.telemetry.reader.rank_reader import Facts
from boltmesh.telemetry.reader.traffic_reader import TrafficReader
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import (
    CollectiveInFlight,
    CollectiveTotal,
    GroupProgress,
    PeerTotal,
)
from boltmesh.telemetry.writer.file_records import MAX_NUMBER
from boltmesh.telemetry.writer.rank_ranges import unpack_ranks


class _Group(NamedTuple):
    name: str
    axis: str
    ranks: tuple[int, ...]


class TrafficView:
    """The collectives of one rank, with the names of this moment.

    Args:
        facts: The names behind the numbers.
        header: Its clocks, and how many ranks there are.
    """

    def __init__(self, facts: Facts, header: Header) -> None:
        self._header = header
        self._operators = [clean(each, 60) for each in facts.operators[: layout.MAX_OPERATORS]]
        self._groups = [
            _Group(
                clean(each.name, 100),
                clean(each.axis, 40),
                unpack_ranks(each.members, min(header.world_size, layout.UNKNOWN_PEER)),
            )
            for each in facts.groups[: layout.MAX_GROUPS]
        ]

    def collectives(self, traffic: TrafficReader) -> tuple[CollectiveTotal, ...]:
        """Return each operator on each group, to all peers together."""
        sums: dict[tuple[int, int], list[int]] = {}
        for (group, operator, _), values in traffic.sums.sums.items():
            before = sums.get((group, operator))
            sums[group, operator] = (
                values if before is None else [a + b for a, b in zip(before, values, strict=True)]
            )
        steps = traffic.sums.num_steps
        result = []
        for key, (calls, payload_bytes) in sorted(traffic.totals.items()):
            if not self._is_named(*key):
                continue
            mean = sums.get(key, [0, 0, 0, 0])
            is_timed = steps > 0 and key in sums and not mean[3]
            named = self._groups[key[0]]
            result.append(
                CollectiveTotal(
                    axis=named.axis,
                    group=named.name,
                    operator=self._operators[key[1]],
                    calls=calls,
                    payload_bytes=payload_bytes,
                    calls_per_step=mean[0] / steps if steps else None,
                    bytes_per_step=mean[1] / steps if steps else None,
                    seconds_per_step=mean[2] / steps / 1e9 if is_timed else None,
                )
            )
        return tuple(result)

    def peers(self, traffic: TrafficReader) -> tuple[PeerTotal, ...]:
        """Return what went to and came from each peer, whichever call asked for it."""
        steps = traffic.sums.num_steps
        found: dict[tuple[str, str, int], list[int]] = {}
        for (group, operator, peer), (calls, payload_bytes) in traffic.peers().items():
            if not self._is_named(group, operator):
                continue
            direction = "send" if self._operators[operator] == "send" else "recv"
            total = found.setdefault((self._groups[group].axis, direction, peer), [0, 0, 0])
            mean = traffic.sums.sums.get((group, operator, peer + 1), [0, 0])
            total[0] += calls
            total[1] += payload_bytes
            total[2] += mean[1]
        return tuple(
            PeerTotal(
                axis=axis,
                operator=direction,
                peer=peer,
                calls=min(total[0], MAX_NUMBER),
                payload_bytes=min(total[1], MAX_NUMBER),
                bytes_per_step=total[2] / steps if steps else None,
            )
            for (axis, direction, peer), total in sorted(found.items())
        )

    def groups(self, traffic: TrafficReader) -> tuple[GroupProgress, ...]:
        """Return how far the rank has come in each group, those included that it never used."""
        calls = [0] * len(self._groups)
        for (number, _), (count, _) in traffic.totals.items():
            if number < len(calls):
                calls[number] += count
        result = []
        for number, group in enumerate(self._groups):
            newest = traffic.progress.get(number)
            is_known = newest is not None and newest.operator < len(self._operators)
            result.append(
                GroupProgress(
                    axis=group.axis,
                    group=group.name,
                    ranks=group.ranks,
                    sequence=min(max(calls[number], newest.in_group if newest else 0), MAX_NUMBER),
                    operator=self._operators[newest.operator] if newest and is_known else None,
                    is_done=_is_done(newest.flags, newest.done_ns) if newest else None,
                    time=self._time(newest.done_ns or newest.enqueued_ns) if newest else None,
                )
            )
        return tuple(result)

    def in_flight(self, traffic: TrafficReader) -> tuple[CollectiveInFlight | None, float]:
        """Return the newest collective, and the wall clock of its enqueue or end."""
        newest = traffic.newest
        if newest is None or not self._is_named(newest.group, newest.operator):
            return None, 0.0
        found = CollectiveInFlight(
            axis=self._groups[newest.group].axis,
            operator=self._operators[newest.operator],
            sequence=newest.in_group,
            is_done=_is_done(newest.flags, newest.done_ns),
        )
        return found, self._time(newest.done_ns or newest.enqueued_ns)

    def _is_named(self, group: int, operator: int) -> bool:
        """Tell whether the names of both are written yet."""
        return group < len(self._groups) and operator < len(self._operators)

    def _time(self, monotonic_ns: int) -> float:
        return self._header.wall_time(monotonic_ns)


def _is_done(flags: int, done_ns: int) -> bool | None:
    return done_ns > 0 if flags & layout.TRAFFIC_IS_TIMED else None
