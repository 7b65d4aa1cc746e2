"""Following a ring: what is damaged is skipped and counted, what was torn for a moment is not."""

import os

import pytest

from boltmesh.telemetry import layout
from boltmesh.telemetry.job import rank_file
from boltmesh.telemetry.layout import SECTIONS
from boltmesh.telemetry.reader.rank_reader import RankReader
from tests.telemetry.test_reader import make_job, make_rank, snapshot, write_step

EVENTS = SECTIONS["events"]


class Damaged:
    """A rank with ten events, and its file to write into."""

    def __init__(self):
        job = make_job()
        self.file = make_rank(job)
        self.path = rank_file(job, 0)
        for number in range(10):
            self.file.event("warning", str(number))

    def slot(self, sequence):
        return layout.slot_offset(EVENTS, sequence)

    def take(self, sequence):
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), EVENTS.record_bytes, self.slot(sequence))

    def put(self, sequence, content):
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), content, self.slot(sequence))

    def tear(self, sequence):
        """Leave the record half of what it is; return what it was."""
        whole = self.take(sequence)
        self.put(sequence, whole[:20] + b"\xaa" * 30 + whole[50:])
        return whole


@pytest.fixture
def damaged():
    found = Damaged()
    yield found
    found.file.close()


def messages(reader):
    return [line.message for line in reader.events.records.values()]


@pytest.mark.parametrize("is_brief", [False, True])
def test_damaged_records_are_skipped_and_counted(damaged, is_brief):
    for sequence in (3, 4, 8):
        damaged.tear(sequence)
    reader = RankReader(damaged.path, is_brief=is_brief)
    reader.read()
    assert messages(reader) == ["0", "1", "4", "5", "6", "8", "9"]
    assert reader.num_damaged == 3
    reader.close()
    assert snapshot().ranks[0].skipped_records == 3


def test_a_record_torn_while_it_is_read_is_found_whole_later(damaged):
    reader = RankReader(damaged.path)
    reader.read()
    damaged.file.event("warning", "10")
    whole = damaged.tear(11)
    reader.read()
    assert messages(reader)[-1] == "9"
    damaged.file.event("warning", "11")
    reader.read()
    assert messages(reader)[-2:] == ["9", "11"]
    assert reader.num_damaged == 1
    damaged.put(11, whole)
    reader.read()
    assert messages(reader)[-3:] == ["9", "10", "11"]
    assert reader.num_damaged == 0
    reader.close()


def test_the_last_record_of_a_rank_that_was_killed_while_it_wrote_is_counted(damaged):
    reader = RankReader(damaged.path)
    reader.read()
    damaged.file.event("warning", "10")
    damaged.tear(11)
    reader.read()
    assert (messages(reader)[-1], reader.num_damaged) == ("9", 1)
    reader.close()


def test_a_reader_goes_on_behind_more_damage_than_it_looks_across(damaged):
    reader = RankReader(damaged.path)
    reader.read()
    for number in range(10, 110):
        damaged.file.event("warning", str(number))
    for sequence in range(11, 101):
        damaged.tear(sequence)
    reader.read()
    assert messages(reader)[-1] == "9"
    for number in range(110, 110 + EVENTS.capacity):
        damaged.file.event("warning", str(number))
    reader.read()
    first = 110 + EVENTS.capacity - EVENTS.capacity
    assert messages(reader) == [str(each) for each in range(first, first + EVENTS.capacity)]
    assert reader.num_damaged == 0
    reader.close()


@pytest.mark.parametrize("num_events", [1, 9, 255, 256, 257, 300, 511, 512, 513])
def test_a_brief_reader_finds_the_newest_wherever_the_ring_stands(num_events):
    job = make_job()
    file = make_rank(job)
    for number in range(num_events):
        file.event("warning", str(number))
    brief, full = (RankReader(rank_file(job, 0), is_brief=each) for each in (True, False))
    for _ in range(3):
        for reader in (brief, full):
            reader.read()
        oldest = max(0, num_events - EVENTS.capacity)
        assert messages(brief) == messages(full) == [str(n) for n in range(oldest, num_events)]
        file.event("warning", str(num_events))
        num_events += 1
    brief.close()
    full.close()
    file.close()


def test_a_look_that_finds_nothing_new_says_so():
    job = make_job()
    file = make_rank(job)
    write_step(file, 0)
    reader = RankReader(rank_file(job, 0))
    reader.read()
    assert reader.changed
    reader.read()
    assert reader.changed == set()
    write_step(file, 1)
    reader.read()
    assert "steps" in reader.changed
    file.phase(4)
    reader.read()
    assert reader.changed == {"phase"}
    reader.close()
    file.close()
