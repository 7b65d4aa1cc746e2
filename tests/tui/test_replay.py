"""A recording plays as it was seen: forward, backward, at any speed, up to any damage."""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from boltmesh.errors import ConfigError
from boltmesh.tui.commands.record import MIN_BETWEEN_KEYS
from boltmesh.tui.sources.frames import (
    FrameDecoder,
    FrameEncoder,
    encode_error,
    magic_line,
    write_frame,
)
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.sources.replay import KEEP_EVERY, MAX_KEPT, ReplaySource
from boltmesh.tui.state import State, fold
from tests.tui.played import look, rewound, write
from tests.tui.samples import NOW

Replay = Callable[..., ReplaySource]

NUM = 2 * MIN_BETWEEN_KEYS + 17


class Clock:
    """Stands until it is told to go on."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "job.rec"
    return write(path, *(look(second, last=NUM - 1) for second in range(NUM)))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(recorded: Path, clock: Clock, replay: Replay) -> ReplaySource:
    return replay(recorded, clock=clock)


def test_it_begins_with_the_first_frame_and_knows_its_span(source: ReplaySource) -> None:
    assert source.span() == (NOW, NOW + NUM - 1)
    assert source.num_frames == NUM
    assert source.note is None
    assert source.is_playing
    assert source.read() == look(0)


def test_it_plays_with_the_clock_and_stays_at_the_end(source: ReplaySource, clock: Clock) -> None:
    assert source.read() == look(0)
    clock.now += 1.5
    assert source.read() == look(1)
    assert source.position == NOW + 1.5
    clock.now += 0.5
    assert source.read() == look(2)
    clock.now += 10_000
    assert source.read() == look(NUM - 1, last=NUM - 1)
    assert source.is_at_end
    clock.now += 10_000
    assert source.read() == look(NUM - 1, last=NUM - 1)
    assert source.position == NOW + NUM - 1


def test_every_frame_comes_out_as_it_went_in(source: ReplaySource) -> None:
    assert list(source.frames()) == [look(second, last=NUM - 1) for second in range(NUM)]


def test_frames_begin_at_the_clock_and_end_where_they_are_to(source: ReplaySource) -> None:
    source.seek(NOW + 5)
    assert [seen.time - NOW for seen in source.frames(until=NOW + 8)] == [5, 6, 7, 8]


@pytest.mark.parametrize(("speed", "moved"), [(0.5, 2), (1.0, 4), (16.0, 64)])
def test_speed_stretches_time(source: ReplaySource, clock: Clock, speed: float, moved: int) -> None:
    source.speed = speed
    clock.now += 4
    assert source.read().time == NOW + moved


def test_a_change_of_speed_counts_from_that_moment_on(source: ReplaySource, clock: Clock) -> None:
    clock.now += 4
    source.speed = 2.0
    clock.now += 3
    assert source.position == NOW + 10
    source.speed = 1000.0
    assert source.speed == 16.0
    source.speed = 0.0
    assert source.speed == 0.5


def test_a_pause_holds_the_clock(source: ReplaySource, clock: Clock) -> None:
    clock.now += 3
    source.pause()
    assert not source.is_playing
    clock.now += 100
    assert source.read() == look(3)
    source.play()
    clock.now += 1
    assert source.read() == look(4)


def test_playing_on_at_the_end_begins_again(source: ReplaySource, clock: Clock) -> None:
    source.seek(NOW + 10_000)
    source.read()
    source.pause()
    source.play()
    assert source.read() == rewound(look(0))


def test_a_jump_lands_on_the_frame_that_was_true_then(source: ReplaySource) -> None:
    source.pause()
    for second in (
        100,
        MIN_BETWEEN_KEYS,
        MIN_BETWEEN_KEYS - 1,
        3,
        NUM - 2,
        0,
        MIN_BETWEEN_KEYS + 1,
    ):
        source.seek(NOW + second + 0.4)
        assert msgspec.structs.replace(source.read(), is_rewound=False) == look(second)
    source.seek(NOW - 1000)
    assert source.position == NOW
    source.seek(NOW + 10_000)
    assert source.position == NOW + NUM - 1


def test_steps_stop_the_clock_and_end_at_the_ends(source: ReplaySource, clock: Clock) -> None:
    source.step(1)
    assert not source.is_playing
    clock.now += 100
    assert source.read() == look(1)
    source.step(2)
    assert source.read() == look(3)
    source.step(-1)
    assert source.read() == rewound(look(2))
    assert source.read() == look(2)
    source.step(-100)
    assert source.read().time == NOW
    source.step(10_000)
    assert source.read().time == NOW + NUM - 1


def test_only_going_back_is_marked_and_only_once(source: ReplaySource) -> None:
    source.pause()
    assert not source.read().is_rewound
    source.seek(NOW + 90)
    assert not source.read().is_rewound
    source.seek(NOW + 30)
    assert source.read().is_rewound
    assert not source.read().is_rewound
    source.step(1)
    assert not source.read().is_rewound


def test_the_state_forgets_what_is_not_yet_true(source: ReplaySource) -> None:
    source.pause()
    state: State | None = None
    for second in (20, 100, 40):
        source.seek(NOW + second)
        state = fold(state, source.read())
        assert state.series["loss"].steps == tuple(range(1, second + 1))
        assert {each.steps for each in state.trends.values()} <= {(second,), (20, second)}
    # Utilisation is known of the looks alone; all else as if it had been watched up to here.
    watched = fold(fold(None, look(30)), look(40))
    assert state is not None
    assert msgspec.structs.replace(state, trends={}) == msgspec.structs.replace(watched, trends={})


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every payload that is decoded from now on."""
    payloads: list[bytes] = []
    decode = FrameDecoder.decode

    def decode_and_note(self: FrameDecoder, payload: bytes) -> Observation:
        payloads.append(payload)
        return decode(self, payload)

    monkeypatch.setattr(FrameDecoder, "decode", decode_and_note)
    return payloads


def test_a_look_costs_no_more_than_the_frames_since_the_last(
    source: ReplaySource, clock: Clock, decoded: list[bytes]
) -> None:
    source.read()
    clock.now += 2
    source.read()
    source.read()
    assert len(decoded) == 3


def test_going_back_frame_by_frame_begins_near(source: ReplaySource, decoded: list[bytes]) -> None:
    source.seek(NOW + NUM - 1)
    source.read()
    decoded.clear()
    for back in range(1, KEEP_EVERY * 3):
        source.step(-1)
        assert msgspec.structs.replace(source.read(), is_rewound=False) == look(NUM - 1 - back)
    assert len(decoded) <= KEEP_EVERY * KEEP_EVERY * 3


def test_wherever_it_was_before_a_moment_looks_the_same(source: ReplaySource) -> None:
    """Kept decoders are taken up again and again, and none of them is spoilt by it."""
    source.pause()
    place = 1
    for _ in range(200):
        place = place * 61 % 97 * 3 % NUM
        source.seek(NOW + place)
        seen = msgspec.structs.replace(source.read(), is_rewound=False)
        assert seen == look(place, last=NUM - 1)
        assert len(source._kept) <= MAX_KEPT


def test_another_thread_may_jump_while_one_reads(source: ReplaySource) -> None:
    failures: list[BaseException] = []
    done = threading.Event()

    def jump() -> None:
        try:
            for round_ in range(300):
                source.seek(NOW + round_ * 37 % NUM)
                source.step(-1)
                source.speed = 1 + round_ % 5
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)
        done.set()

    thread = threading.Thread(target=jump)
    thread.start()
    while not done.is_set():
        seen = source.read()
        assert seen.job.global_step == seen.time - NOW
    thread.join()
    assert failures == []


# --- files that are not whole


def sizes_of(path: Path) -> list[int]:
    """Where each frame ends."""
    source = ReplaySource(path)
    ends = [frame.offset for frame in source._frames[1:]] + [path.stat().st_size]
    source.close()
    return ends


def test_a_recording_cut_anywhere_plays_up_to_its_last_whole_frame(
    recorded: Path, tmp_path: Path, replay: Replay
) -> None:
    content, ends, path = recorded.read_bytes(), sizes_of(recorded), tmp_path / "cut.rec"
    for size in (*range(ends[1], ends[4], 31), ends[2] - 1, ends[2], ends[2] + 1, ends[2] + 9):
        path.write_bytes(content[:size])
        source = replay(path)
        whole = sum(end <= size for end in ends)
        assert source.num_frames == whole
        assert (source.note is None) == (size in ends)
        if source.note is not None:
            assert source.note.startswith(f"the recording is played up to {whole} frames: ")
        source.seek(NOW + NUM)
        assert source.read() == look(whole - 1)
        source.close()


def test_a_damaged_frame_ends_the_recording(recorded: Path, tmp_path: Path, replay: Replay) -> None:
    content, ends, path = bytearray(recorded.read_bytes()), sizes_of(recorded), tmp_path / "bad.rec"
    content[ends[9] + 20] ^= 0x40
    path.write_bytes(content)
    source = replay(path)
    assert source.num_frames == 10
    assert source.note is not None
    assert "checksum" in source.note


def test_frames_that_are_whole_and_make_no_sense_end_it_too(tmp_path: Path, replay: Replay) -> None:
    path, encoder = tmp_path / "odd.rec", FrameEncoder()
    frames = [encoder.encode(look(second)) for second in range(6)]
    with path.open("wb") as file:
        file.write(magic_line())
        for payload in (*frames[:3], frames[4], frames[5]):  # one is missing
            write_frame(file, payload)
    source = replay(path)
    assert source.num_frames == 5
    source.seek(NOW + 99)
    assert source.read() == look(2)
    assert source.note == (
        "the recording is played up to 3 frames: a frame is missing before this one."
    )
    assert source.span() == (NOW, NOW + 2)
    source.step(-1)
    assert source.read() == rewound(look(1))


@pytest.mark.parametrize("num_cases", [150, pytest.param(1500, marks=pytest.mark.full)])
def test_no_content_of_a_frame_stops_the_viewer(num_cases: int, tmp_path: Path) -> None:
    """Payloads are spoilt under a right checksum, so that scanner and decoder meet them."""
    choose, path, encoder = random.Random(7), tmp_path / "odd.rec", FrameEncoder()
    whole = [encoder.encode(look(second)) for second in range(4)]
    refused: list[str] = []
    num_cut = 0
    for _ in range(num_cases):
        payloads = [bytearray(payload) for payload in whole]
        spoilt = choose.choice(payloads)
        for _ in range(choose.choice((1, 1, 2, 8))):
            spoilt[choose.randrange(min(len(spoilt), 400))] = choose.randrange(256)
        if choose.random() < 0.2:
            del spoilt[choose.randrange(1, len(spoilt)) :]
        with path.open("wb") as file:
            file.write(magic_line())
            for payload in payloads:
                write_frame(file, bytes(payload))
        try:
            source = ReplaySource(path)
        except ConfigError as error:
            refused.append(str(error))
            continue
        try:
            assert 1 <= len(list(source.frames())) <= 4
            num_cut += source.note is not None
        except ConfigError as error:  # not even the first frame can be read
            refused.append(str(error))
        finally:
            source.close()
    assert len(refused) > num_cases / 30
    assert all(message.count("\n") == 0 and str(path) in message for message in refused)
    assert num_cut > num_cases / 5


def test_an_error_among_the_frames_ends_it(tmp_path: Path, replay: Replay) -> None:
    path = tmp_path / "error.rec"
    with path.open("wb") as file:
        file.write(magic_line())
        write_frame(file, FrameEncoder().encode(look(0)))
        write_frame(file, encode_error("no such job"))
    assert replay(path).num_frames == 1


def test_a_clock_that_was_set_back_lets_time_stand_still(tmp_path: Path, replay: Replay) -> None:
    seconds = (10, 11, 5, 6, 12)
    path = write(tmp_path / "back.rec", *(look(second) for second in seconds))
    source = replay(path)
    assert source.span() == (NOW + 10, NOW + 12)
    assert source.num_frames == 5
    source.seek(NOW + 11)
    assert source.read() == look(6)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no recording."),
        (b"#!/bin/sh\necho hello\n", "is no recording."),
        (os.urandom(5000), "is no recording."),
        (b"boltmesh-frames 99 7.0.0\n", "version 99"),
        (magic_line(), "holds no frame that can be read: it ends before the first."),
        (magic_line() + b"\x00\x00", "holds no frame that can be read: "),
        (magic_line() + os.urandom(100), "holds no frame that can be read: "),
    ],
    ids=["empty", "script", "random", "version", "no-frame", "torn", "noise"],
)
def test_a_foreign_file_is_one_clear_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ReplaySource(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent", Path("/dev/null")):
        with pytest.raises(ConfigError, match=str(path)):
            ReplaySource(path)
