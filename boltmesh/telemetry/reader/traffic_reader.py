"""Reads the collectives that a rank counted, and returns their part of a snapshot.

``TrafficReader`` has totals, the newest collective of each group and the rank's peers. The ring has
each collective with its operator's totals; the tables have what the ring has forgotten. So the
tables are read once, and again when the ring was lost sight of. ``TrafficView`` puts the names of
operators and groups to these numbers.
"""

from typing import TYPE_CHECKING, Final, NamedTuple

from boltmesh.telemetry import layout
from boltmesh.telemetry.layout import SECTIONS, Header
from boltmesh.telemetry.rank_ranges import unpack_ranks
from boltmesh.telemetry.reader.file_records import MAX_NUMBER, StepRow, Traffic, make_traffic
from boltmesh.telemetry.reader.ring import Change, Read, Ring
from boltmesh.telemetry.reader.step_sums import TrafficSums
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import (
    CollectiveInFlight,
    CollectiveTotal,
    GroupProgress,
    PeerTotal,
)

if TYPE_CHECKING:
    from boltmesh.telemetry.reader.rank_reader import Facts

_COUNTERS: Final = SECTIONS["counters"]
_GROUPS: Final = SECTIONS["groups"]
_PEERS: Final = SECTIONS["peers"]
_TRAFFIC: Final = SECTIONS["traffic"]


class Progress(NamedTuple):
    """The newest collective of a group."""

    sequence: int
    """Sequence number of its record in the ring."""
    in_group: int
    operator: int
    flags: int
    enqueued_ns: int
    done_ns: int


class TrafficReader:
    """The collectives of one rank.

    Args:
        ring: Its records.
        num_recent: How many optimizer steps the means are over.
        most_behind: How many records may be read one after the other to catch up. If there are
            more, only those that the recent steps need are read. None: all are read.
    """

    def __init__(
        self, ring: Ring[Traffic], *, num_recent: int, most_behind: int | None = None
    ) -> None:
        self.ring = ring
        self.sums = TrafficSums(num_recent)
        self._most_behind = most_behind
        self.totals: dict[tuple[int, int], tuple[int, int]] = {}
        """Calls and payload bytes by group and operator, since the start."""
        self.newest: Traffic | None = None
        self.progress: dict[int, Progress] = {}
        """By group."""
        self.damaged: set[tuple[str, int]] = set()
        """Table and slot of invalid records."""
        self._known_from = -1
        self._peer_table: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self._to_peers: dict[int, Traffic] = {}
        """Point-to-point calls that may not be in the table yet, by sequence number."""
        self._has_peers = False
        self._counted = 0

    def follow_steps(self, steps: list[Change[StepRow]]) -> None:
        """Take note of batches that have ended."""
        for _, step in steps:
            self.sums.push(step)

    def update(
        self, read: Read, counted: int, *, num_named: tuple[int, int], is_fresh: bool
    ) -> bool:
        """Read new records; return whether there are any.

        Args:
            read: Reads the file.
            counted: The record up to which the tables are written.
            num_named: How many groups and operators have a name.
            is_fresh: Whether the rank may have written the tables since the last call.
        """
        needed_after = self.sums.needed_after
        self._counted = max(self._counted, counted)
        if self._most_behind is not None and counted - self.ring.newest > self._most_behind:
            self.ring.restart()
        changes = self.ring.update(
            read, lambda record: record.sequence <= counted and record.step <= needed_after
        )
        is_lost = self.ring.first != self._known_from
        if is_lost:
            self._known_from = self.ring.first
            if changes and self._known_from > 1:
                self.sums.break_before(min(after.step for _, after in changes))
        for before, after in changes:
            self._add(before, after)
        is_changed = bool(changes)
        if is_lost:
            self._read_counters(read, *num_named)
            is_changed = True
        if is_lost or (is_fresh and self._has_late()):
            is_changed |= self._read_groups(read)
        if is_lost or (is_fresh and self._has_peers):
            is_changed |= self._read_peers(read)
        return self.sums.move() or is_changed

    def peers(self) -> dict[tuple[int, int, int], tuple[int, int]]:
        """Return calls and payload bytes by group, operator and the peer's global rank."""
        totals = {key: (calls, size) for key, (calls, size, _) in self._peer_table.items()}
        for sequence, record in self._to_peers.items():
            key = (record.group, record.operator, record.peer - 1)
            entry = self._peer_table.get(key)
            if sequence > (entry[2] if entry is not None else 0):
                calls, size = totals.get(key, (0, 0))
                totals[key] = (calls + 1, size + record.payload_bytes)
        return totals

    def _add(self, before: Traffic | None, after: Traffic) -> None:
        if before is not None:
            self.sums.add(before, -1)
        self.sums.add(after)
        key = (after.group, after.operator)
        if after.total_calls > self.totals.get(key, (0, 0))[0]:
            self.totals[key] = (after.total_calls, after.total_bytes)
        if self.newest is None or after.sequence >= self.newest.sequence:
            self.newest = after
        known = self.progress.get(after.group)
        if known is None or after.sequence >= known.sequence:
            self.progress[after.group] = _progress(after)
        if after.peer:
            self._has_peers = True
            if after.peer != layout.UNKNOWN_PEER:
                self._to_peers[after.sequence] = after

    def _has_late(self) -> bool:
        """Whether a group's newest collective may have completed after its record left the ring."""
        return any(
            not each.done_ns
            and each.flags & layout.TRAFFIC_IS_TIMED
            and self.newest is not None
            and self.newest.sequence - each.sequence >= _TRAFFIC.capacity
            for each in self.progress.values()
        )

    def _read_counters(self, read: Read, num_groups: int, num_operators: int) -> None:
        size = _COUNTERS.record_bytes
        for group in range(min(num_groups, layout.MAX_GROUPS)):
            first = group * layout.MAX_OPERATORS
            number = min(num_operators, layout.MAX_OPERATORS)
            row = read(_COUNTERS.offset + first * size, number * size)
            for operator in range(len(row) // size):
                fields = self._unpack("counters", layout.COUNTER, row, operator, size, first)
                if fields is not None:
                    calls, payload_bytes = fields
                    known = self.totals.get((group, operator), (0, 0))
                    self.totals[group, operator] = max(known, (calls, payload_bytes))

    def _read_groups(self, read: Read) -> bool:
        content = read(_GROUPS.offset, _GROUPS.end - _GROUPS.offset)
        size = _GROUPS.record_bytes
        is_changed = False
        for group in range(len(content) // size):
            fields = self._unpack("groups", layout.GROUP, content, group, size)
            if fields is None:
                continue
            in_group, sequence, operator, flags, _, enqueued_ns, done_ns = fields
            found = Progress(sequence, in_group, operator, flags, enqueued_ns, done_ns)
            record = self._in_ring(read, sequence)
            if record is not None and record.group == group:
                found = _progress(record)
            known = self.progress.get(group)
            # The table has the newest that was completed: older than one that is still waited for.
            is_newer = known is None or (found.sequence, found.done_ns) > (
                known.sequence,
                known.done_ns,
            )
            if is_newer:
                self.progress[group] = found
                is_changed = True
        return is_changed

    def _in_ring(self, read: Read, sequence: int) -> Traffic | None:
        """Return a record that the ring may still have: it knows the completion."""
        at = layout.slot_offset(_TRAFFIC, max(sequence, 1))
        fields = layout.TRAFFIC.unpack(read(at, _TRAFFIC.record_bytes), 0)
        return make_traffic(fields) if fields and fields[0] == sequence else None

    def _read_peers(self, read: Read) -> bool:
        size = _PEERS.record_bytes
        content = read(_PEERS.offset, min(len(self._peer_table) + 64, _PEERS.capacity) * size)
        if content[-size:].strip(b"\0"):
            content = read(_PEERS.offset, _PEERS.capacity * size)
        table: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        for slot in range(len(content) // size):
            if fields := self._unpack("peers", layout.PEER, content, slot, size):
                calls, group, operator, peer, counted, payload_bytes = fields
                key = (group, operator, peer)
                known = self._peer_table.get(key, (0, 0, 0))
                table[key] = max(known, (calls, payload_bytes, counted))
        is_changed = table != self._peer_table
        self._peer_table = {**self._peer_table, **table}
        self._has_peers = self._has_peers or bool(table)
        for sequence in [each for each in self._to_peers if each <= self._counted]:
            del self._to_peers[sequence]
        return is_changed

    def _unpack(
        self,
        table: str,
        record: layout.Record,
        content: bytes,
        number: int,
        size: int,
        first: int = 0,
    ) -> tuple[int, ...] | None:
        """Return a record of a part of a table that begins with slot ``first``."""
        at, slot = number * size, first + number
        if content[at : at + 8] == bytes(8):
            return None
        fields = record.unpack(content, at)
        if fields is None or max(fields) > MAX_NUMBER:
            self.damaged.add((table, slot))
            return None
        self.damaged.discard((table, slot))
        return fields


def _progress(record: Traffic) -> Progress:
    return Progress(
        record.sequence,
        record.in_group,
        record.operator,
        record.flags,
        record.enqueued_ns,
        record.done_ns,
    )


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

    def __init__(self, facts: "Facts", header: Header) -> None:
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
        """Return the traffic with each peer, by direction."""
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
