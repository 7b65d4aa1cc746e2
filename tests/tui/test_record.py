"""What ``boltmesh record`` leaves behind: one private file, whole up to its last frame."""

import gc
import itertools
import os
import resource
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from boltmesh.errors import ConfigError, TelemetryError
from boltmesh.tui.commands.record import (
    MAX_BETWEEN_KEYS,
    MIN_BETWEEN_KEYS,
    RecordingWriter,
    record_source,
)
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.sources.replay import ReplaySource
from tests.tui.played import look, write
from tests.tui.samples import NOW, FakeSource

Replay = Callable[..., ReplaySource]


class Clock:
    """Sleeping is all that takes time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def frames_of(path: Path) -> list[float]:
    source = ReplaySource(path)
    times = [seen.time - NOW for seen in source.frames()]
    source.close()
    return times


def test_it_ends_with_the_job(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "a.rec"
    looks = [look(second, last=3) for second in range(6)]
    with RecordingWriter(path) as recording:
        record_source(FakeSource(*looks), recording, interval_s=2.0, clock=clock, sleep=clock.sleep)
    assert frames_of(path) == [0, 1, 2, 3]
    assert clock.slept == [2.0, 2.0, 2.0]


def test_a_finished_job_is_one_frame(tmp_path: Path, replay: Replay) -> None:
    path = tmp_path / "a.rec"
    with RecordingWriter(path) as recording:
        record_source(FakeSource(look(9, last=9)), recording, interval_s=1.0)
    source = replay(path)
    assert source.num_frames == 1
    assert source.read() == look(9, last=9)


def test_it_ends_after_the_time_that_is_asked_for(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "a.rec"
    with RecordingWriter(path) as recording:
        record_source(
            FakeSource(*(look(second) for second in range(60))),
            recording,
            interval_s=1.0,
            for_s=5.0,
            clock=clock,
            sleep=clock.sleep,
        )
    assert frames_of(path) == [0, 1, 2, 3, 4, 5]
    assert clock.now == 5.0


def test_a_slow_look_does_not_shift_the_rhythm(tmp_path: Path) -> None:
    clock = Clock()

    class Slow(FakeSource):
        def read(self) -> Observation:
            clock.now += 0.3
            return super().read()

    with RecordingWriter(tmp_path / "a.rec") as recording:
        looks = [look(second, last=3) for second in range(4)]
        record_source(Slow(*looks), recording, interval_s=1.0, clock=clock, sleep=clock.sleep)
    assert clock.slept == pytest.approx([0.7, 0.7, 0.7])


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write(tmp_path / "a.rec", look(0))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_frame_is_in_the_file_before_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    with RecordingWriter(path) as recording:
        for second in range(3):
            recording.add(look(second))
            assert frames_of(path) == list(range(second + 1))
            assert recording.num_bytes == path.stat().st_size


def keys_of(source: ReplaySource) -> list[int]:
    return [number for number, frame in enumerate(source._frames) if frame.is_key]


def test_a_whole_frame_comes_when_the_others_have_become_as_large(
    tmp_path: Path, replay: Replay
) -> None:
    path = write(tmp_path / "a.rec", *(look(30 + second) for second in range(200)))
    source = replay(path)
    keys = keys_of(source)
    sizes = [after.offset - frame.offset for frame, after in itertools.pairwise(source._frames)]
    assert keys[0] == 0
    assert len(keys) > 2
    for key, following in itertools.pairwise(keys):
        between = sum(sizes[key + 1 : following])
        assert following - key > MIN_BETWEEN_KEYS
        assert between >= sizes[key] - 100
        assert (
            following - key == MIN_BETWEEN_KEYS + 1 or between - sizes[following - 1] < sizes[key]
        )
    assert sum(sizes[key] for key in keys[1:-1]) <= sum(sizes) / 2


def test_of_a_job_that_stands_still_it_comes_after_a_while_all_the_same(
    tmp_path: Path, replay: Replay
) -> None:
    still = (msgspec.structs.replace(look(1000), time=NOW + second) for second in range(1300))
    source = replay(write(tmp_path / "a.rec", *still))
    assert keys_of(source) == [0, MAX_BETWEEN_KEYS + 1, 2 * MAX_BETWEEN_KEYS + 2]


def test_what_is_new_costs_little(tmp_path: Path) -> None:
    one = write(tmp_path / "one.rec", look(100)).stat().st_size
    many = write(tmp_path / "many.rec", *(look(100 + second) for second in range(41)))
    assert (many.stat().st_size - one) / 40 < one / 5


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"exists\. Name another file, or add --force"):
        RecordingWriter(path)
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == ["mine"]


def test_force_replaces_it_only_when_there_is_something_to_replace_it_with(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("precious")
    with RecordingWriter(path, has_force=True) as recording:
        assert path.read_text() == "precious"
        recording.add(look(0))
        assert frames_of(path) == [0]
        recording.add(look(1))
    assert frames_of(path) == [0, 1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(TelemetryError), RecordingWriter(path, has_force=True):
        raise TelemetryError("the job is gone")
    assert frames_of(path) == [0, 1]
    assert os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize("has_force", [False, True])
def test_links_folders_and_pipes_are_no_place_for_it(tmp_path: Path, has_force: bool) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "pipe", "."):
        with pytest.raises(ConfigError, match="is no plain file"):
            RecordingWriter(tmp_path / name, has_force=has_force)
    with pytest.raises(ConfigError, match="cannot be made: No such file or directory"):
        RecordingWriter(tmp_path / "absent" / "a.rec", has_force=has_force)
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        RecordingWriter(tmp_path / "target" / "a.rec", has_force=has_force)
    assert (tmp_path / "target").read_text() == "precious"


def test_a_recording_without_a_frame_leaves_no_file(tmp_path: Path) -> None:
    source = FakeSource(look(0))
    source.lost = "job.json is gone"
    with (
        pytest.raises(TelemetryError, match=r"job\.json is gone"),
        RecordingWriter(tmp_path / "a.rec") as recording,
    ):
        record_source(source, recording, interval_s=1.0)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_ends_it_after_a_whole_frame(tmp_path: Path, replay: Replay) -> None:
    """A file size limit does what a full disk does: a part is written, then there is an error."""
    path = tmp_path / "a.rec"
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with RecordingWriter(path) as recording:
            for second in range(3):
                recording.add(look(second))
            resource.setrlimit(resource.RLIMIT_FSIZE, (recording.num_bytes + 30, limits[1]))
            with pytest.raises(TelemetryError) as caught:
                recording.add(look(50))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    size = path.stat().st_size
    assert str(caught.value) == (
        f"{path} cannot be written: File too large. It has 3 frames, {size:,} bytes."
    )
    assert frames_of(path) == [0, 1, 2]
    assert replay(path).note is None
    del caught
    gc.collect()  # from Python 3.13 on the end of a stream that fails is told, and fails the test
