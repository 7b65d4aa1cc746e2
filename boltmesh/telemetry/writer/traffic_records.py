"""Counts collectives in a rank's file: a record each, and tables of totals.

A record is written at once, the tables ten times a second: the record has its operator's totals,
so nothing is lost between. What the ring forgets before that is written into the tables first.
"""

import mmap
import time
from threading import RLock
from typing import Final

from boltmesh.telemetry import layout
from boltmesh.telemetry.layout import SECTIONS

_TRAFFIC_AT: Final = SECTIONS["traffic"].offset
_TRAFFIC_BYTES: Final = SECTIONS["traffic"].record_bytes
_TRAFFIC_CAPACITY: Final = SECTIONS["traffic"].capacity
_COUNTERS_AT: Final = SECTIONS["counters"].offset
_COUNTER_BYTES: Final = SECTIONS["counters"].record_bytes
_GROUPS_AT: Final = SECTIONS["groups"].offset
_GROUP_BYTES: Final = SECTIONS["groups"].record_bytes
_PEERS_AT: Final = SECTIONS["peers"].offset
_PEER_BYTES: Final = SECTIONS["peers"].record_bytes

_NONE: Final = (0,) * 12
_pack = layout.TRAFFIC.pack

Key = tuple[int, int]
"""Group and operator."""


class TrafficRecords:
    """The part of a rank's file for collectives; ``RankFile`` is the whole.

    Args:
        mapping: The file.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        # A signal handler that communicates or notes an event runs between any two lines of the
        # thread that holds the lock: Lightning's do.
        self.lock = RLock()
        self._map: mmap.mmap | None = mapping
        self.sequences = dict.fromkeys(("steps", "traffic", "spans", "events", "offload"), 0)
        """Number of the newest record of each section."""
        self._counters: dict[Key, list[int]] = {}
        self._unwritten: set[Key] = set()
        self._newest: list[tuple[int, ...]] = [_NONE] * layout.MAX_GROUPS
        self._peers: dict[tuple[int, int, int], list[int]] = {}
        """Calls, payload bytes and slot, by group, operator and peer."""
        self._unwritten_peers: set[tuple[int, int, int]] = set()
        self.counted = 0
        """Number of the newest traffic record that the counters in the file include."""
        self.payload_bytes = 0
        """All collectives since this process opened the file."""

    def enqueue(
        self,
        step: int,
        group: int,
        operator: int,
        phase: int,
        flags: int,
        payload_bytes: int,
        peer: int = 0,
    ) -> tuple[int, ...]:
        """Count a collective and append its record; return the argument of ``complete``.

        ``peer`` is as in ``layout.TRAFFIC``.
        """
        with self.lock:
            key = (group, operator)
            counter = self._counters.get(key)
            if counter is None:
                counter = self._counters[key] = [0, 0]
            counter[0] += 1
            counter[1] += payload_bytes
            self.payload_bytes += payload_bytes
            self._unwritten.add(key)
            sequence = self.sequences["traffic"] = self.sequences["traffic"] + 1
            ticket = self._newest[group] = (
                sequence,
                step,
                group,
                operator,
                phase,
                flags,
                peer,
                self._newest[group][7] + 1,
                payload_bytes,
                counter[0],
                counter[1],
                time.monotonic_ns(),
            )
            if self._map is not None:
                at = _TRAFFIC_AT + (sequence - 1) % _TRAFFIC_CAPACITY * _TRAFFIC_BYTES
                self._map[at : at + _TRAFFIC_BYTES] = _pack(*ticket, 0)
                if sequence % (_TRAFFIC_CAPACITY // 2) == 0:
                    # Before the ring overwrites records that the tables lack.
                    self.write_counters_locked()
                    self._write_groups(range(layout.MAX_GROUPS))
            if peer:
                self._count_peer(group, operator, peer, payload_bytes)
            return ticket

    def complete(self, ticket: tuple[int, ...], done_ns: int) -> None:
        """Record when a collective was done."""
        sequence = ticket[0]
        with self.lock:
            if self._map is None:
                return
            if self.sequences["traffic"] - sequence < _TRAFFIC_CAPACITY:
                at = _TRAFFIC_AT + (sequence - 1) % _TRAFFIC_CAPACITY * _TRAFFIC_BYTES
                self._map[at : at + _TRAFFIC_BYTES] = _pack(*ticket, done_ns)
            elif self._newest[ticket[2]][0] == sequence:
                self._write_group(ticket, done_ns)

    def newest(self) -> list[tuple[tuple[int, ...], int, bool]]:
        """Return the newest collective of each group, as ``enqueue`` returned it.

        With when it was done, 0 if it is not or that is not known, and whether the group has calls
        from rank to rank.
        """
        with self.lock:
            paired = {group for group, *_ in self._peers}
            return [
                (ticket, self._done_ns(ticket), ticket[2] in paired)
                for ticket in self._newest
                if ticket[0]
            ]

    def _done_ns(self, ticket: tuple[int, ...]) -> int:
        if self._map is None:
            return 0
        if self.sequences["traffic"] - ticket[0] < _TRAFFIC_CAPACITY:
            at = _TRAFFIC_AT + (ticket[0] - 1) % _TRAFFIC_CAPACITY * _TRAFFIC_BYTES
            record = layout.TRAFFIC.unpack(self._map[at : at + _TRAFFIC_BYTES], 0)
            return record[12] if record else 0
        at = _GROUPS_AT + ticket[2] * _GROUP_BYTES
        newest = layout.GROUP.unpack(self._map[at : at + _GROUP_BYTES], 0)
        return newest[6] if newest and newest[1] == ticket[0] else 0

    def lose(self, ticket: tuple[int, ...]) -> None:
        """Record that the completion of a collective will not be known."""
        self._change(ticket, flags=ticket[5] & ~layout.TRAFFIC_IS_TIMED, peer=ticket[6])

    def find_peer(self, ticket: tuple[int, ...], peer: int) -> None:
        """Record the source of an any-source receive; ``peer`` is as in ``layout.TRAFFIC``."""
        self._change(ticket, flags=ticket[5], peer=peer)
        with self.lock:
            self._count_peer(ticket[2], ticket[3], peer, ticket[8])

    def _change(self, ticket: tuple[int, ...], *, flags: int, peer: int) -> None:
        ticket = (*ticket[:5], flags, peer, *ticket[7:])
        with self.lock:
            sequence, group = ticket[0], ticket[2]
            if self._newest[group][0] == sequence:
                self._newest[group] = ticket
            is_kept = self.sequences["traffic"] - sequence < _TRAFFIC_CAPACITY
            if self._map is not None and is_kept:
                at = layout.slot_offset(SECTIONS["traffic"], sequence)
                self._map[at : at + _TRAFFIC_BYTES] = layout.TRAFFIC.pack(*ticket, 0)

    def _count_peer(self, group: int, operator: int, peer: int, payload_bytes: int) -> None:
        if peer == layout.UNKNOWN_PEER:
            return
        key = (group, operator, peer - 1)
        total = self._peers.get(key)
        if total is None:
            if len(self._peers) == layout.MAX_PEERS:
                return
            total = self._peers[key] = [0, 0, len(self._peers)]
        total[0] += 1
        total[1] += payload_bytes
        self._unwritten_peers.add(key)

    def write_counters(self) -> None:
        """Write the totals of the operators that were called since the last time."""
        if self._unwritten or self._unwritten_peers:
            with self.lock:
                self.write_counters_locked()

    def write_counters_locked(self) -> None:
        """Write those totals, with the lock held."""
        groups = {group for group, _ in self._unwritten}
        while self._unwritten:
            key = self._unwritten.pop()
            if self._map is not None:
                at = _COUNTERS_AT + (key[0] * layout.MAX_OPERATORS + key[1]) * _COUNTER_BYTES
                self._map[at : at + _COUNTER_BYTES] = layout.COUNTER.pack(*self._counters[key])
        counted = self.sequences["traffic"]
        while self._unwritten_peers:
            group, operator, peer = peer_key = self._unwritten_peers.pop()
            calls, payload_bytes, slot = self._peers[peer_key]
            if self._map is not None:
                at = _PEERS_AT + slot * _PEER_BYTES
                self._map[at : at + _PEER_BYTES] = layout.PEER.pack(
                    calls, group, operator, peer, counted, payload_bytes
                )
        self._write_groups(groups)
        self.counted = counted

    def _write_groups(self, groups: "set[int] | range") -> None:
        """Write the newest collective of groups, as the ring has it."""
        if self._map is None:
            return
        for group in groups:
            ticket = self._newest[group]
            if 0 <= self.sequences["traffic"] - ticket[0] < _TRAFFIC_CAPACITY and ticket[0]:
                self._write_group(ticket, self._done_ns(ticket))

    def _write_group(self, ticket: tuple[int, ...], done_ns: int) -> None:
        assert self._map is not None
        sequence, _, group, operator, _, flags, _, in_group, *_, enqueued_ns = ticket
        at = _GROUPS_AT + group * _GROUP_BYTES
        self._map[at : at + _GROUP_BYTES] = layout.GROUP.pack(
            in_group, sequence, operator, flags, 0, enqueued_ns, done_ns
        )

    def restore_traffic(self, content: bytes) -> None:
        """Take up the counts where this process left them."""
        counters, peers = SECTIONS["counters"], SECTIONS["peers"]
        for index in range(counters.capacity):
            at = counters.offset + index * counters.record_bytes
            if values := layout.COUNTER.unpack(content, at):
                self._counters[divmod(index, layout.MAX_OPERATORS)] = list(values)
        for slot in range(peers.capacity):
            at = peers.offset + slot * peers.record_bytes
            if values := layout.PEER.unpack(content, at):
                calls, group, operator, peer, _, payload_bytes = values
                self._peers[group, operator, peer] = [calls, payload_bytes, slot]
        traffic = SECTIONS["traffic"]
        for slot in range(traffic.capacity):
            at = traffic.offset + slot * traffic.record_bytes
            if values := layout.TRAFFIC.unpack(content, at):
                counter = self._counters.setdefault(values[2:4], [0, 0])
                if values[9] > counter[0]:
                    counter[:] = values[9:11]
        for (group, _), (calls, _) in self._counters.items():
            sequence = self._newest[group][7] + calls
            self._newest[group] = (*_NONE[:7], sequence, *_NONE[8:])
