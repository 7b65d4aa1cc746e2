"""Reads what a rank counted of its collectives: totals, the newest of each group, its peers.

The ring has each collective with its operator's totals; the tables have what the ring has
forgotten. So the tables are read once, and again when the ring was lost sight of.
"""

from typing import Final, NamedTuple

from boltmesh.telemetry import layout
from boltmesh.telemetry.layout import SECTIONS
from boltmesh.telemetry.reader.ring import Change, Read, Ring
from boltmesh.telemetry.reader.step_sums import TrafficSums
from boltmesh.telemetry.writer.file_records import MAX_NUMBER, StepRow, Traffic, make_traffic

_COUNTERS: Final = SECTIONS["counters"]
_GROUPS: Final = SECTIONS["groups"]
_PEERS: Final = SECTIONS["peers"]
_TRAFFIC: Final = SECTIONS["traffic"]


class Progress(NamedTuple):
    """The newest collective of a group."""

    sequence: int
    """Of its record in the ring."""
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
        most_behind: How many records may be read one after the other to catch up. Of more, only
            what the recent steps need is read. None: all are read.
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
        """Table and slot of what is no record."""
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
        """Read what is new; return whether anything is.

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
        """Tell whether a group's newest collective may have been done behind the ring."""
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
