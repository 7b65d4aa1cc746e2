"""The file format: what is written comes back, and what is not whole does not."""

import struct
import zlib

import pytest

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout
from boltmesh.telemetry.layout import SECTIONS, Header

HEADER = Header(4711, 123456, 99, 3, 8, 1_700_000_000.5, 10**12)

RECORDS = {
    "status": (layout.STATUS, (1, 0, 0, 2, 100, 7, 1.5, 2**40, -1, -1, -1, 12)),
    "memory": (layout.MEMORY, tuple(range(-1, 23))),
    "group": (layout.GROUP, (8192, 3, 2, 0, 10**15, 0)),
    "peer": (layout.PEER, (1, 2, 1023, 8192, 2**50)),
    "counter": (layout.COUNTER, (2**50,)),
    "step": (layout.STEP, (5, 6, 1, 1, 2.5, 10**9, *range(9), 0.25, 32, -1)),
    "point": (layout.POINT, (12, -0.5)),
    "traffic": (layout.TRAFFIC, (9, 1, 2, 3, 2, 0, 77, 4096, 5, 9999, 10**15, 0)),
    "span": (layout.SPAN, (9, 1, 2, 0, 0, 0, 10**15, 10**15 + 5)),
    "offload": (layout.OFFLOAD, (12, *range(2**50, 2**50 + 12))),
    "event": (layout.EVENT, (1.25, 1, 0, 5, b"hello".ljust(layout.MAX_MESSAGE, b"\0"))),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_comes_back_as_it_was(kind):
    record, fields = RECORDS[kind]
    sealed = record.pack(41, *fields)
    assert len(sealed) == record.size
    assert record.unpack(b"\xff" * 10 + sealed, 10) == (41, *fields)


@pytest.mark.parametrize("kind", RECORDS)
def test_every_changed_bit_is_noticed(kind):
    record, fields = RECORDS[kind]
    sealed = record.pack(41, *fields)
    for position in range(0, 8 * len(sealed), 7):
        damaged = bytearray(sealed)
        damaged[position // 8] ^= 1 << position % 8
        assert record.unpack(bytes(damaged), 0) is None, position


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_that_is_half_written_over_an_older_one_is_refused(kind):
    record, fields = RECORDS[kind]
    older, newer = record.pack(1, *fields), record.pack(257, *fields)
    for cut in range(1, len(newer)):
        torn = newer[:cut] + older[cut:]
        assert record.unpack(torn, 0) in {None, (1, *fields), (257, *fields)}
    assert record.unpack(newer[:4] + older[4:], 0) is None


def test_a_short_buffer_and_an_empty_slot_hold_no_record():
    sealed = layout.POINT.pack(1, 2, 3.0)
    assert layout.POINT.unpack(sealed[:-1], 0) is None
    assert layout.POINT.unpack(bytes(100), 0) is None


def test_sections_do_not_overlap_and_the_file_is_less_than_three_megabytes():
    end = layout.PAGE
    for section in SECTIONS.values():
        assert section.offset >= end
        assert section.offset % layout.PAGE == 0
        end = section.end
    assert end <= layout.FILE_BYTES <= 3e6


def test_the_layout_of_version_5_never_moves():
    # A reader of another release finds the sections where this one wrote them.
    digest = zlib.crc32(HEADER.pack())
    assert (layout.VERSION, layout.FILE_BYTES, digest) == (5, 2719744, 0xFEAD7202)


def test_a_header_comes_back_and_turns_one_clock_into_the_other():
    header = layout.parse_header(HEADER.pack())
    assert header == HEADER
    assert header.wall_time(10**12 + 2 * 10**9) == pytest.approx(1_700_000_002.5)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"", "0 bytes"),
        (HEADER.pack()[:-1], "no whole header"),
        (bytes(layout.PAGE), "not a telemetry file"),
        (
            b"BOLTMESH" + struct.pack("<I", 2) + HEADER.pack()[12:],
            "version 2, .* version 5",
        ),
        (HEADER.pack()[:20] + b"\x7f" + HEADER.pack()[21:], "damaged"),
        (HEADER.pack()[:90] + b"\x7f" + HEADER.pack()[91:], "damaged"),
    ],
    ids=["empty", "short", "foreign", "other version", "damaged head", "damaged table"],
)
def test_a_header_that_cannot_be_trusted_says_why(page, reason):
    with pytest.raises(TelemetryError, match=reason):
        layout.parse_header(page)


def test_names_survive_a_writer_that_dies_in_the_middle():
    content = bytearray(layout.FILE_BYTES)
    section = SECTIONS["names"]
    for sequence, text in ((1, b'{"a":1}'), (2, b'{"a":2}')):
        at = layout.slot_offset(section, sequence)
        sealed = layout.pack_names(sequence, text)
        content[at : at + len(sealed)] = sealed
    assert layout.unpack_names(bytes(content)) == b'{"a":2}'
    half = layout.pack_names(3, b'{"a":3}')[:-3]
    at = layout.slot_offset(section, 3)
    content[at : at + len(half)] = half
    assert layout.unpack_names(bytes(content)) == b'{"a":2}'


def test_names_that_do_not_fit_are_refused():
    with pytest.raises(TelemetryError, match="65536 fit"):
        layout.pack_names(1, bytes(layout.NAMES_BYTES))


def test_the_stride_of_a_series_doubles_whenever_its_slots_are_full():
    slots = layout.THINNED_POINTS
    assert layout.series_stride(slots) == 1
    assert layout.series_stride(slots + 1) == 2
    assert layout.series_stride(2 * slots) == 2
    assert layout.series_stride(2 * slots + 1) == 4
