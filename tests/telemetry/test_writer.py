"""Writing a rank's file: privacy, room, forks, and what a second open finds."""

import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import time
import warnings

import pytest

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout
from boltmesh.telemetry.job import rank_file
from boltmesh.telemetry.reader.rank_reader import RankReader
from boltmesh.telemetry.reader.rank_view import RankView
from boltmesh.telemetry.snapshot import PHASES, MetricPoint
from boltmesh.telemetry.writer import rank_file as rank_file_module
from boltmesh.telemetry.writer.rank_file import OTHERS, RankFile


@pytest.fixture
def path(tmp_path):
    return rank_file(tmp_path, 0)


def open_file(path):
    return RankFile(path, rank=0, world_size=1)


def read(path):
    reader = RankReader(path)
    reader.read()
    reader.close()
    return reader


def series(path):
    reader = RankReader(path)
    reader.read()
    points, is_whole = reader.read_series(is_whole=True)
    reader.close()
    assert is_whole
    return by_metric(points)


def by_metric(named_points):
    names = dict.fromkeys(name for name, _ in named_points)
    return {each: [point for name, point in named_points if name == each] for each in names}


def test_a_file_is_private_whole_and_allocated(path):
    before = os.umask(0)
    try:
        file = open_file(path)
    finally:
        os.umask(before)
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == layout.FILE_BYTES
    assert found.st_blocks * 512 >= layout.FILE_BYTES  # a sparse page would kill on a full disk
    file.close()


def test_a_link_in_the_place_of_the_file_is_refused_and_its_target_untouched(path, tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        open_file(path)
    assert target.read_text() == "precious"


def test_a_file_of_somebody_else_is_refused(path, monkeypatch):
    open_file(path).close()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(TelemetryError, match="belongs to user"):
        open_file(path)


def test_a_second_process_cannot_write_the_same_file(path):
    file = open_file(path)
    script = f"""
        from pathlib import Path
        from boltmesh.telemetry.writer.rank_file import RankFile
        try:
            RankFile(Path({str(path)!r}), rank=0, world_size=1)
        except Exception as error:
            print(error)
    """
    run = [sys.executable, "-c", textwrap.dedent(script)]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert "written by another process" in said
    file.close()


def test_an_event_holds_no_secret(path):
    file = open_file(path)
    file.event("error", "OSError: https://me:s3cret@host/?sig=s3cret has no KeyError: 'width'")
    ((_, _, message),) = read(path).events.records.values()
    assert message == "OSError: https://[redacted]@host/?sig=[redacted] has no KeyError: 'width'"
    file.close()


def test_the_file_of_a_dead_process_is_replaced(path):
    script = f"""
        from pathlib import Path
        from boltmesh.telemetry.writer.rank_file import RankFile
        file = RankFile(Path({str(path)!r}), rank=0, world_size=1)
        file.write_facts({{}})
        file.event("start", "the first")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    file = open_file(path)
    file.event("start", "the second")
    assert [message for _, _, message in read(path).events.records.values()] == ["the second"]
    file.close()


def test_a_process_goes_on_in_its_own_file(path):
    file = open_file(path)
    data = file.group_number("7", "data")
    reduce = file.operator_number("allreduce")
    for step in range(3):
        ticket = file.enqueue(step, data, reduce, 0, layout.TRAFFIC_IS_TIMED, 100)
        file.complete(ticket, time.monotonic_ns())
        file.point("loss", step, float(step))
        file.event("warning", str(step))
    file.close()

    file = open_file(path)
    assert file.group_number("7", "data") == data
    file.enqueue(3, data, reduce, 0, 0, 50)
    file.point("loss", 3, 3.0)
    file.event("warning", "3")
    found = read(path)
    assert [message for _, _, message in found.events.records.values()] == ["0", "1", "2", "3"]
    assert found.traffic.totals == {(data, reduce): (4, 350)}
    assert [record.in_group for record in found.traffic.ring.records.values()] == [1, 2, 3, 4]
    assert [value for _, _, value in series(path)["loss"]] == [0.0, 1.0, 2.0, 3.0]
    file.close()


def test_a_forked_child_neither_writes_nor_keeps_the_lock(path):
    file = open_file(path)
    file.write_facts({})
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if child == 0:  # lives until the parent has looked at the lock
        file.event("warning", "from the child")
        os.write(writing, b"open" if file.is_open else b"shut")
        signal.pause()
    assert os.read(reading, 4) == b"shut"
    file.event("warning", "from the parent")
    assert [message for _, _, message in read(path).events.records.values()] == ["from the parent"]
    file.close()
    again = RankReader(path)
    again.read()
    assert not again.is_alive
    again.close()
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)


def test_a_full_disk_is_said_before_anything_is_mapped(path, monkeypatch):
    class Full:
        f_bavail = 3
        f_frsize = 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(TelemetryError, match="BOLTMESH_RUN_DIR"):
        open_file(path)
    assert list(path.parent.iterdir()) == []


def test_room_that_goes_while_the_file_is_made_leaves_nothing_behind(path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        open_file(path)
    assert list(path.parent.iterdir()) == []


def kept(num_values):
    """Give the values that a series has, by what the layout promises."""
    values = range(num_values)
    thinned = values[:: layout.series_stride(num_values)]
    return {*values[-256:], *values[::16][-256:], *thinned}


def test_a_series_spans_the_whole_run_evenly_and_knows_its_newest_value(path):
    file = open_file(path)
    file.point("other", 0, 0.0)
    num_values = 5000
    for step in range(num_values):
        file.point("loss", step, step / 2)
    points = series(path)["loss"]
    steps = [global_step for _, global_step, _ in points]
    assert steps[0] == 0
    assert steps[-1] == num_values - 1
    assert steps == sorted(set(steps))
    assert len(steps) <= layout.POINTS_PER_SERIES
    assert set(steps) >= kept(num_values)
    assert all(value == global_step / 2 for _, global_step, value in points)
    assert series(path)["other"] == [(1, 0, 0.0)]
    file.close()


@pytest.mark.parametrize("most_new", [1, 40, 300])
def test_a_series_that_is_followed_has_all_that_a_first_look_has(path, most_new):
    file = open_file(path)
    draw, reader, step = random.Random(most_new), RankReader(path), 0
    num_whole, num_looks = 0, 0
    points: list[tuple[int, int, float]] = []
    while step < 9000:
        for _ in range(draw.randint(1, most_new)):
            file.point("loss", step, step / 2)
            step += 1
        reader.read()
        new, is_whole = reader.read_series()
        points = [*([] if is_whole else points), *by_metric(new)["loss"]]
        num_whole, num_looks = num_whole + is_whole, num_looks + 1
        assert reader.read_series() == ([], False)
        assert points[-1] == (step, step - 1, (step - 1) / 2)
    assert num_whole == 1 if most_new <= layout.RING_POINTS else 1 < num_whole < num_looks
    assert points == sorted(set(points))
    assert {at for _, at, _ in points} >= kept(step)
    assert all((count, value) == (at + 1, at / 2) for count, at, value in points)
    reader.close()
    file.close()


def test_a_history_that_is_followed_grows_at_its_end_and_has_all_of_the_file(path):
    file = open_file(path)
    view, num_grown, step = RankView(0, RankReader(path)), 0, 0
    before: tuple[tuple[MetricPoint, ...], tuple[MetricPoint, ...]] = (), ()
    for _ in range(150):
        for _ in range(random.Random(step).randint(1, 40)):
            step += 1
            file.step(step, step, 0, layout.STEP_HAS_LOSS, time.time(), 100, *[10] * len(PHASES),
                      step / 2, 16, 64)  # fmt: skip
            file.point("loss", step, step / 2)
            file.point("val_loss", step, step / 4)
            file.point(layout.TREND + "tokens_per_s", step, step)
        view.look()
        now = view.history(data_size=3)
        for points, last in zip(now, before, strict=True):
            for name in {point.name for point in points}:
                steps = [point.global_step for point in points if point.name == name]
                assert steps == sorted(set(steps))
                assert {at - 1 for at in steps} >= kept(step)
            num_grown += 0 < len(last) <= len(points) and points[len(last) - 1] is last[-1]
        before = now
    assert num_grown > 0.9 * 2 * 150
    metrics, trends = now
    halves = {"loss": 2, "val_loss": 4}
    assert all(point.value == point.global_step / halves[point.name] for point in metrics)
    assert all(point.value == 3 * point.global_step for point in trends)
    assert len(metrics) < 4 * layout.POINTS_PER_SERIES
    view.close()
    file.close()


def test_a_viewer_that_comes_after_a_day_sees_the_last_minutes_in_detail(path):
    file = open_file(path)
    seconds_per_point = 8 * 0.4  # a mean of eight steps
    num_values = int(24 * 3600 / seconds_per_point)
    for step in range(num_values):
        file.point(layout.TREND + "power_watts", 8 * step, 300.0)
    (points,) = series(path).values()
    ages = [seconds_per_point * (num_values - count) for count, *_ in points]
    minutes = {most: sum(age <= 60 * most for age in ages) for most in (1, 10, 60, 24 * 60)}
    assert minutes[1] == 19  # every point
    assert minutes[10] == 188
    assert minutes[60] > 300
    assert minutes[24 * 60] > 800
    file.close()


def test_a_ring_keeps_the_newest_records(path):
    file = open_file(path)
    file.write_facts({})
    reader = RankReader(path)
    capacity = layout.SECTIONS["events"].capacity
    for number in range(10):
        file.event("warning", str(number))
    reader.read()
    assert len(reader.events.records) == 10
    for number in range(10, 2 * capacity + 50):
        file.event("warning", str(number))
    reader.read()
    messages = [message for _, _, message in reader.events.records.values()]
    assert messages == [str(number) for number in range(capacity + 50, 2 * capacity + 50)]
    assert list(read(path).events.records) == list(reader.events.records)
    reader.close()
    file.close()


def test_names_beyond_the_limit_share_one_number_that_says_so(path):
    file = open_file(path)
    for number in range(layout.MAX_GROUPS + 5):
        file.enqueue(0, file.group_number(f"group {number}", "data"), 0, 0, 0, 1)
    facts = read(path).facts
    assert len(facts.groups) == layout.MAX_GROUPS
    assert facts.groups[-1].name == OTHERS
    assert facts.groups[-1].axis == "other"
    file.close()


def test_metrics_beyond_the_limit_are_left_out_and_named_and_the_loss_has_room(path):
    file = open_file(path)
    for step in range(2):
        for number in range(1000):
            file.point(f"metric {number}", step, 1000.0 * step + number)
        file.point("loss", step, 0.5)
        file.point("lr", step, 0.1)
        file.point(layout.TREND + "step_s", step, 0.25)
    reader = read(path)
    points, _ = reader.read_series(is_whole=True)
    found = {name: [value for *_, value in each] for name, each in by_metric(points).items()}
    most = layout.MAX_METRICS - layout.OWN_METRICS
    own = {"loss": [0.5, 0.5], "lr": [0.1, 0.1], layout.TREND + "step_s": [0.25, 0.25]}
    assert found == {f"metric {at}": [at, 1000.0 + at] for at in range(most)} | own
    ((_, kind, message),) = reader.events.records.values()
    assert kind == "warning"
    assert f"first {most} metrics" in message
    assert f"'metric {most}'" in message
    file.close()


def test_a_group_may_be_named_after_it_was_used(path):
    file = open_file(path)
    number = file.group_number("3", "other")
    assert file.group_number("3", "tensor") == number
    assert [(group.name, group.axis) for group in read(path).facts.groups] == [("3", "tensor")]
    file.close()


def test_the_time_of_the_file_is_renewed_each_minute(path, monkeypatch):
    file = open_file(path)
    os.utime(path, (0, 0))
    file.touch()
    assert path.stat().st_mtime == 0
    monkeypatch.setattr(rank_file_module, "TOUCH_EVERY_NS", 0)
    file.touch()
    assert path.stat().st_mtime > 0
    file.close()


def test_nothing_happens_after_close(path):
    file = open_file(path)
    ticket = file.enqueue(0, 0, 0, 0, 0, 1)
    file.close()
    file.close()
    file.event("warning", "too late")
    file.point("loss", 1, 1.0)
    file.status(1, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0)
    file.phase(1)
    file.complete(ticket, time.monotonic_ns())
    file.touch()
    assert list(read(path).events.records) == []


def test_a_long_message_is_cut_and_odd_ones_do_not_break_the_reader(path):
    file = open_file(path)
    file.event("warning", "ü" * 1000)
    file.event("warning", "lone \ud800 surrogate")
    messages = [message for _, _, message in read(path).events.records.values()]
    assert messages[0].startswith("üüü")
    assert len(messages[0].encode()) <= layout.MAX_MESSAGE + 2
    assert messages[1] == "lone ? surrogate"
    file.close()
