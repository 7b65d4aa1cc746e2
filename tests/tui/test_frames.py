"""Frames: what goes in comes out, and nothing else is ever believed."""

import io
import random
import struct
import zlib
from typing import Any

import msgspec
import pytest

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.snapshot import GroupProgress, MetricPoint
from boltmesh.tui.sources import frames, patches
from boltmesh.tui.sources.frames import (
    FrameDecoder,
    FrameEncoder,
    Hello,
    RemoteError,
    VersionError,
    check_magic,
    decode_hello,
    decode_jobs,
    encode_error,
    encode_hello,
    encode_jobs,
    magic_line,
    read_frame,
    read_magic,
    write_frame,
)
from boltmesh.tui.sources.live import Observation
from tests.tui.random_values import Randomly
from tests.tui.samples import NOW, demo, job, rank, step, summary

NUM_HOSTILE = 2000


def look(second: int, *, num_ranks: int = 8, ring: int = 256, pace: int = 4) -> Observation:
    """A job whose rings are full and roll on."""
    newest = ring + second * pace
    draw = random.Random(second)
    ranks = tuple(
        rank(
            number,
            last_seen=NOW + second,
            global_step=newest,
            steps=tuple(
                step(index, loss=(index * 7919 + number) % 1000 / 999)
                for index in range(newest - ring, newest)
            ),
            samples_per_second=draw.random(),
            groups=(
                GroupProgress("data", "data", (0, 1), newest, "allreduce", True, NOW + second),
            ),
        )
        for number in range(num_ranks)
    )
    points = tuple(MetricPoint("loss", index, 1 / (index + 1)) for index in range(newest))
    return Observation(NOW + second, job(ranks=ranks, history=points[-4096:]))


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(each, marks=pytest.mark.full) for each in range(20, 100))]
)
def test_a_random_sequence_comes_out_as_it_went_in(seed: int) -> None:
    randomly = Randomly(seed)
    encoder, decoder = FrameEncoder(), FrameDecoder()
    seen = _with_id(randomly.value(Observation))
    for _ in range(12):
        is_key = randomly.generator.random() < 0.1
        assert decoder.decode(encoder.encode(seen, is_key=is_key)) == seen
        same_job = randomly.generator.random() < 0.95
        seen = _with_id(randomly.neighbour(seen) if same_job else randomly.value(Observation))


def _with_id(seen: Observation) -> Observation:
    return msgspec.structs.replace(seen, job=msgspec.structs.replace(seen.job, id="abcd"))


def test_mappings_keep_their_order() -> None:
    encoder, decoder = FrameEncoder(), FrameDecoder()
    meshes: list[dict[str, int]] = [
        {"pipeline": 1, "data": 2},
        {"data": 3, "pipeline": 1},
        {"data": 3, "tensor": 3, "pipeline": 1},
        {"tensor": 3},
        {"data": 4, "tensor": 3},
    ]
    for mesh in meshes:
        seen = decoder.decode(encoder.encode(Observation(NOW, job(mesh=mesh))))
        assert list(seen.job.mesh.items()) == list(mesh.items())


def test_rings_that_roll_over_cost_only_what_is_new() -> None:
    encoder, decoder = FrameEncoder(), FrameDecoder()
    first = look(0)
    key = encoder.encode(first)
    assert decoder.decode(key) == first
    for second in range(1, 5):
        seen = look(second)
        delta = encoder.encode(seen)
        assert decoder.decode(delta) == seen
        assert len(delta) < 4_000 < 30_000 < len(key)


def test_a_ring_that_went_round_between_two_looks_comes_out_whole() -> None:
    encoder, decoder = FrameEncoder(), FrameDecoder()
    for second in (0, 1000, 1001, 3):
        seen = look(second, num_ranks=2, ring=32)
        assert decoder.decode(encoder.encode(seen)) == seen


def test_a_key_frame_can_be_read_by_itself() -> None:
    encoder = FrameEncoder()
    encoder.encode(demo())
    encoder.encode(demo(later_s=1))
    assert FrameDecoder().decode(encoder.encode(demo(later_s=2), is_key=True)) == demo(later_s=2)


def test_a_delta_needs_the_frame_before_it() -> None:
    encoder, decoder = FrameEncoder(), FrameDecoder()
    key = encoder.encode(demo())
    deltas = [encoder.encode(demo(later_s=second)) for second in (1, 2)]
    with pytest.raises(TelemetryError, match="a frame is missing"):
        FrameDecoder().decode(deltas[0])
    decoder.decode(key)
    with pytest.raises(TelemetryError, match="a frame is missing"):
        decoder.decode(deltas[1])
    with pytest.raises(TelemetryError, match="a frame is missing"):
        decoder.decode(deltas[0])  # what it once knew is not trusted any more
    assert decoder.decode(key) == demo()


def test_a_side_with_more_or_fewer_fields_is_understood() -> None:
    class Older(msgspec.Struct, frozen=True):
        time: float
        job: Any
        gone: str = "x"

    payload = msgspec.msgpack.decode(FrameEncoder().encode(Observation(NOW, job())))
    kind, fields, patch = payload
    fields["Observation"] = ["time", "unknown", "job", "devices"]
    moved = [{0: 0, 1: 2, 2: 3}[each] if at % 2 == 0 else each for at, each in enumerate(patch)]
    theirs = msgspec.msgpack.encode([kind, fields, [*moved, 1, {"any": ["thing"]}]])
    assert FrameDecoder().decode(theirs) == Observation(NOW, job())

    fields["JobSnapshot"] = [f"not_{name}" for name in fields["JobSnapshot"]]
    with pytest.raises(TelemetryError, match="JobSnapshot lacks the field schema"):
        FrameDecoder().decode(msgspec.msgpack.encode([kind, fields, moved]))


def test_an_error_is_told_in_one_clean_line() -> None:
    with pytest.raises(RemoteError) as told:
        FrameDecoder().decode(encode_error("no job\n\x1b[31mhere"))
    assert str(told.value) == "no job here"
    with pytest.raises(RemoteError, match="no job"):
        decode_jobs(encode_error("no job"))


def test_lists_of_jobs_come_out_as_they_went_in() -> None:
    jobs = [summary(1), summary(2, state="crashed")]
    assert decode_jobs(encode_jobs(jobs)) == jobs
    assert decode_jobs(encode_jobs([])) == []
    with pytest.raises(TelemetryError, match="something else"):
        decode_jobs(FrameEncoder().encode(demo()))
    with pytest.raises(TelemetryError, match="kind 3"):
        FrameDecoder().decode(encode_jobs(jobs))


def test_a_stream_introduces_its_job() -> None:
    hello = Hello("abc", "node1", "/venv/bin/python", ("def",))
    assert decode_hello(encode_hello(hello)) == hello
    with pytest.raises(RemoteError, match="no job"):
        decode_hello(encode_error("no job"))
    with pytest.raises(TelemetryError, match="something else"):
        decode_hello(encode_jobs([]))


def test_frames_follow_each_other_in_a_stream() -> None:
    stream = io.BytesIO()
    stream.write(magic_line())
    payloads = [b"", b"x", bytes(3 << 20)]
    for payload in payloads:
        write_frame(stream, payload)
    stream.seek(0)
    read_magic(stream)
    assert [read_frame(stream) for _ in range(4)] == [*payloads, None]


def test_every_torn_stream_is_noticed() -> None:
    stream = io.BytesIO()
    write_frame(stream, FrameEncoder().encode(demo())[:200])
    whole = stream.getvalue()
    for size in range(1, len(whole)):
        with pytest.raises(TelemetryError, match="ends within a frame"):
            read_frame(io.BytesIO(whole[:size]))


def test_a_bit_that_fell_over_is_noticed() -> None:
    stream = io.BytesIO()
    write_frame(stream, b"some frame")
    whole = stream.getvalue()
    for bit in range(32, 8 * len(whole)):  # after the length
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TelemetryError, match="checksum"):
            read_frame(io.BytesIO(bytes(damaged)))


def test_a_claimed_length_reserves_no_memory() -> None:
    claim = struct.pack(">II", frames.MAX_FRAME_BYTES + 1, 0)
    with pytest.raises(TelemetryError, match="claims"):
        read_frame(io.BytesIO(claim + b"x"))
    claim = struct.pack(">II", frames.MAX_FRAME_BYTES, 0)
    with pytest.raises(TelemetryError, match="ends within"):
        read_frame(io.BytesIO(claim + b"x"))


def test_a_frame_that_no_reader_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 4)
    stream = io.BytesIO()
    with pytest.raises(TelemetryError, match="more than"):
        write_frame(stream, b"12345")
    assert stream.getvalue() == b""


def test_another_version_is_told_with_what_to_do() -> None:
    check_magic(magic_line())
    with pytest.raises(VersionError, match=r"boltmesh 9\.1\.0 there .* version 7,.* reads version"):
        check_magic(b"boltmesh-frames 7 9.1.0\n")
    for line in (b"", b"boltmesh-frames\n", b"boltmesh-frames 1", b"\x89PNG\r\n", b"hello\n"):
        with pytest.raises(TelemetryError, match="no frames of boltmesh"):
            check_magic(line)
    with pytest.raises(TelemetryError, match="no frames of boltmesh"):
        read_magic(io.BytesIO(bytes(1 << 20)))


def _mangle(draw: random.Random, value: Any) -> Any:
    """Replace one thing somewhere within what a payload holds."""
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], _mangle(draw, value[at]), *value[at + 1 :]]
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        return {**value, key: _mangle(draw, value[key])}
    return draw.choice(
        (None, -1, 2**40, 0.5, "x", b"x", [], {}, [[]], [0, 2**40], [0, [], 0], {"a": None}, True)
    )


@pytest.mark.parametrize("num_cases", [200, pytest.param(NUM_HOSTILE, marks=pytest.mark.full)])
def test_hostile_payloads_raise_one_error_only(num_cases: int) -> None:
    """Well-formed msgpack with one thing wrong, and bytes at random."""
    draw = random.Random(1)
    encoder = FrameEncoder()
    honest = [encoder.encode(look(second, num_ranks=2, ring=3)) for second in range(2)]
    refused = 0
    for number in range(num_cases):
        decoder = FrameDecoder()
        decoder.decode(honest[0])
        hostile = bytearray(honest[number % 2])
        if draw.random() < 0.3:
            for _ in range(draw.randint(1, 4)):
                hostile[draw.randrange(len(hostile))] = draw.randrange(256)
        else:
            hostile[:] = msgspec.msgpack.encode(_mangle(draw, msgspec.msgpack.decode(hostile)))
        told = ""
        try:
            assert isinstance(decoder.decode(bytes(hostile)), Observation)
        except TelemetryError as error:
            told = str(error)
        refused += bool(told)
        assert "\n" not in told
    assert refused > num_cases / 2


def test_short_frames_cannot_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "MAX_ITEMS", 10_000)
    encoder, decoder = FrameEncoder(), FrameDecoder()
    decoder.decode(encoder.encode(look(0, num_ranks=1, ring=1)))
    fields = [field.name for field in msgspec.structs.fields(Observation)]
    history = [field.name for field in msgspec.structs.fields(type(job()))].index("history")
    copies = [[0, 1]] * 20_000
    bomb = msgspec.msgpack.encode([1, 1, [fields.index("job"), [history, copies]]])
    with pytest.raises(TelemetryError, match="too many items"):
        decoder.decode(bomb)


def test_depth_is_refused() -> None:
    for nested in (b"\x91" * 100_000 + b"\x90", b"\x93\x00\x80" + b"\x91" * 50_000 + b"\x90"):
        with pytest.raises(TelemetryError):
            FrameDecoder().decode(nested)


def test_checksums_are_those_of_zlib() -> None:
    """Written down, so that another program can read the frames."""
    stream = io.BytesIO()
    write_frame(stream, b"abc")
    assert stream.getvalue() == struct.pack(">II", 3, zlib.crc32(b"abc")) + b"abc"
