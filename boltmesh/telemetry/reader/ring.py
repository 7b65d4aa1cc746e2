"""Follows one ring of a rank's file as it grows, so that the cost of a look is that of new records.

[Note: Damage]
A record that is not whole may be being written just now, so it is read once more at once. One
that stays so while a later one is whole is damaged: it is counted, and read again at later looks
in case it was only slow, until the writer comes round and writes over it.
"""

import struct
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from boltmesh.telemetry.layout import SECTIONS, Record

Read = Callable[[int, int], bytes]
"""Reads from an offset a number of bytes; fewer at the end of the file."""

_LOOK_AHEAD: Final = 64
"""Damaged or unfinished records that a ring is followed across."""

_FIRST_BLOCK: Final = 8
_BLOCK: Final = 256
"""Records that are read at once: few at first, because most looks find few."""

_MAX_AGAIN: Final = 64
_SEQUENCE: Final = struct.Struct("<Q")

T = TypeVar("T")

Change = tuple[T | None, T]
"""A record at the last look (None: it is new), and the record now.

A plain tuple, because a NamedTuple cannot be generic on Python 3.10."""


class Ring(Generic[T]):
    """The newest records of one ring, oldest first, by their sequence numbers.

    Args:
        name: The section.
        record: Its kind of record.
        make: Turns the fields, sequence number first, into what is kept; None: they cannot be.
        keep: How many records stay here.
        is_followed_further: Whether older records than those are returned when the ring is
            searched.
        is_brief: Whether the first look finds the newest record by halving, and leaves the slots
            that it does not need unread and their damage uncounted.
        is_final: Whether a record is as it will stay. Others are read again every time.
    """

    def __init__(
        self,
        name: str,
        record: Record,
        make: Callable[[tuple[Any, ...]], T | None],
        *,
        keep: int | None = None,
        is_followed_further: bool = False,
        is_brief: bool = False,
        is_final: Callable[[T], bool] = lambda _: True,
    ) -> None:
        self.records: dict[int, T] = {}
        self.damaged: set[int] = set()
        """Slots whose content is no record. See [Note: Damage]."""
        self.first = 0
        """The oldest record after which none is known to be missing; 0: there is none yet."""
        self._section = SECTIONS[name]
        self._record = record
        self._make = make
        self._keep = min(keep or self._section.capacity, self._section.capacity)
        self._most_found = self._section.capacity if is_followed_further else self._keep
        self._is_final = is_final
        self._is_brief = is_brief
        self._size = self._section.record_bytes
        self._offset = self._section.offset
        self._capacity = self._section.capacity
        self._claims = struct.Struct(f"<Q{self._size - 8}x")
        self._newest = 0
        self._is_searched = False
        self._again: list[int] = []
        self._changes: list[Change[T]] = []

    def update(
        self, read: Read, is_enough: Callable[[T], bool] = lambda _: False
    ) -> list[Change[T]]:
        """Add the records written since the last call, and return them.

        Args:
            read: Reads the file.
            is_enough: Whether this record and all before it can be left. For a ring that is
                searched backwards from its newest record.
        """
        if self._is_searched:
            again, self._again = self._again, []
            for sequence in again:
                if not self._read_again(read, sequence):
                    self._again.append(sequence)
            self._follow(read, is_enough)
        else:
            self._is_searched = True
            if not (self._is_brief and self._go_back(read, is_enough)):
                self._search(read, is_enough)
        surplus = len(self.records) - self._keep
        if surplus > 0:
            for sequence in list(self.records)[:surplus]:
                del self.records[sequence]
        changes, self._changes = self._changes, []
        return changes

    @property
    def newest(self) -> int:
        """The sequence number of the newest record that was read; 0: none."""
        return self._newest

    def restart(self) -> None:
        """Forget the records, and search for the newest again: for readers that are far behind."""
        self.records = {}
        self.first = 0
        self._again = []
        self._changes = []
        self._is_searched = False

    def _slot(self, sequence: int) -> int:
        return (sequence - 1) % self._capacity

    def _at(self, sequence: int) -> int:
        return self._offset + (sequence - 1) % self._capacity * self._size

    def _read_again(self, read: Read, sequence: int) -> bool:
        """Take a record that was not whole, or not final; return whether it is whole."""
        fields = self._record.unpack(read(self._at(sequence), self._size), 0)
        if fields is not None and fields[0] == sequence:
            self._take(fields)
        return fields is not None

    def _follow(self, read: Read, is_enough: Callable[[T], bool]) -> None:
        """Read on from the newest record, across a few that are not whole."""
        sequence = self._newest + 1
        capacity, size = self._capacity, self._size
        claim = read(self._at(sequence), 8)
        if len(claim) < 8 or _SEQUENCE.unpack(claim)[0] == max(0, sequence - capacity):
            return  # as the round before left it
        missing: list[int] = []
        num_records = _FIRST_BLOCK
        while len(missing) < _LOOK_AHEAD:
            number = min(num_records, capacity - self._slot(sequence))
            num_records = _BLOCK
            block = read(self._at(sequence), number * size)
            if len(block) < number * size:
                break
            for at in range(0, len(block), size):
                (claimed,) = _SEQUENCE.unpack_from(block, at)
                if claimed == max(0, sequence - capacity):
                    self._retry_all(read, missing)
                    return
                fields = self._record.unpack(block, at)
                if fields is not None and claimed == sequence:
                    if missing:
                        self._again.extend(self._retry_all(read, missing))
                        missing = []
                    self._take(fields)
                elif (
                    fields is not None
                    and claimed > sequence
                    and self._at(claimed) == self._at(sequence)
                ):  # the writer went round since the last look
                    self._search(read, is_enough)
                    return
                else:
                    missing.append(sequence)
                    if len(missing) == _LOOK_AHEAD:
                        break
                sequence += 1
        self._retry_all(read, missing)

    def _retry_all(self, read: Read, missing: list[int]) -> list[int]:
        """Read incomplete records once more; return those that are still incomplete."""
        return [each for each in missing if not self._retry(read, each)]

    def _retry(self, read: Read, sequence: int) -> bool:
        """Read incomplete records once more, and count those that remain so. See [Note: Damage]."""
        is_whole = self._read_again(read, sequence)
        if not is_whole:
            self.damaged.add(self._slot(sequence))
        return is_whole

    def _search(self, read: Read, is_enough: Callable[[T], bool]) -> None:
        """Look at every slot: the writer went round since the last call, or this is the first."""
        section, size = self._section, self._size
        content = read(section.offset, section.record_bytes * section.capacity)
        content = content[: len(content) // size * size]
        claims = [
            (claimed, slot)
            for slot, (claimed,) in enumerate(self._claims.iter_unpack(content))
            if claimed
        ]
        claims.sort(reverse=True)
        found: list[tuple[tuple[Any, ...], T | None]] = []
        for claimed, slot in claims:
            fields = None
            if self._slot(claimed) == slot:
                if claimed <= self._newest:
                    continue
                fields = self._record.unpack(content, slot * size)
            if fields is None:
                fields = self._record.unpack(read(section.offset + slot * size, size), 0)
            if fields is None or self._slot(fields[0]) != slot:
                self.damaged.add(slot)
                continue
            made = self._make(fields)
            found.append((fields, made))
            if made is not None and (len(found) >= self._most_found or is_enough(made)):
                break
        found.sort(key=lambda each: each[0][0])
        if found and found[0][0][0] > self._newest + 1:
            self.first = 0
        for fields, made in found:
            self._keep_made(fields[0], made)

    def _go_back(self, read: Read, is_enough: Callable[[T], bool]) -> bool:
        """Find the newest record by halving and go back from there; False where that fails."""
        (first,) = _SEQUENCE.unpack(read(self._offset, 8).ljust(8, b"\0"))
        if not first:
            return True  # nothing was ever written
        if self._slot(first) != 0:
            return False
        low, high = 0, self._capacity
        while high - low > 1:
            middle = (low + high) // 2
            claim = read(self._offset + middle * self._size, 8)
            if len(claim) == 8 and _SEQUENCE.unpack(claim)[0] == first + middle:
                low = middle
            else:
                high = middle
        newest = sequence = first + low
        found: list[T | None] = []
        is_over = False
        while sequence > max(0, newest - self._capacity) and not is_over:
            number = min(_BLOCK // 4, self._slot(sequence) + 1)
            block = read(self._at(sequence - number + 1), number * self._size)
            if len(block) < number * self._size:
                return False
            for at in range(len(block) - self._size, -1, -self._size):
                fields = self._record.unpack(block, at)
                if fields is None or fields[0] != sequence:
                    return False
                made = self._make(fields)
                found.append(made)
                is_over = made is not None and (len(found) >= self._most_found or is_enough(made))
                if is_over:
                    break
                sequence -= 1
        for place, made in enumerate(reversed(found)):
            self._keep_made(newest - len(found) + 1 + place, made)
        return True

    def _take(self, fields: tuple[Any, ...]) -> None:
        """Keep a whole record."""
        self._keep_made(fields[0], self._make(fields))

    def _keep_made(self, sequence: int, made: T | None) -> None:
        """Keep the content of a whole record; None: it makes no sense."""
        is_newest = sequence > self._newest
        self._newest = max(self._newest, sequence)
        if made is None:
            self.damaged.add(self._slot(sequence))
            return
        self.damaged.discard(self._slot(sequence))
        before = self.records.get(sequence)
        if before is None and not is_newest:
            if self.records and sequence < next(iter(self.records)):
                return  # older than what is kept
            self.records[sequence] = made
            self.records = dict(sorted(self.records.items()))
            self._changes.append((before, made))
        elif made != before:
            self.records[sequence] = made
            self._changes.append((before, made))
        self.first = self.first or sequence
        if not self._is_final(made):
            self._again.append(sequence)
            del self._again[:-_MAX_AGAIN]
