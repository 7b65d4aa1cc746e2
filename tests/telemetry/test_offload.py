"""What goes between device, host and disk: counted once, per step, with its real bandwidth."""

import threading
import time

import pytest
import torch

from boltmesh.telemetry import layout
from boltmesh.telemetry.reader.file_records import OffloadRow
from boltmesh.telemetry.reader.step_sums import offload_totals
from boltmesh.telemetry.snapshot import MemoryKind, OffloadTotal
from boltmesh.telemetry.writer import communication, memory
from boltmesh.telemetry.writer.memory import StoredBytes, measure
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder
from tests.telemetry.test_reader import make_job, make_rank, snapshot
from tests.telemetry.test_recorder import CPU, make_info, run_step

MIB = 2**20


@pytest.fixture
def recorder():
    recorder = Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})
    yield recorder
    recorder.close()


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock in milliseconds, moved by hand."""

    class Clock:
        milliseconds = 10_000

        def __call__(self):
            return self.milliseconds * 1_000_000

    clock = Clock()
    monkeypatch.setattr(f"{communication.__name__}.time.monotonic_ns", clock)
    return clock


def by_way(totals):
    return {(each.place, each.direction): each for each in totals}


def test_each_way_is_counted_apart_and_told_per_step(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(5):
        recorder.offload("disk", "read", 3 * MIB, 0.0)
        recorder.offload("disk", "read", MIB, 0.0)
        recorder.offload("host", "write", 2 * MIB, 0.0)
        run_step(recorder, number)
    seen = by_way(snapshot().ranks[0].offload)
    assert set(seen) == {("disk", "read"), ("host", "write")}
    read, write = seen["disk", "read"], seen["host", "write"]
    assert (read.calls, read.moved_bytes, read.bytes_per_step) == (10, 20 * MIB, 4 * MIB)
    assert (write.calls, write.moved_bytes, write.bytes_per_step) == (5, 10 * MIB, 2 * MIB)


def test_a_job_that_offloads_nothing_writes_nothing(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(5):
        run_step(recorder, number)
    assert recorder._file.sequences["offload"] == 0
    assert snapshot().ranks[0].offload == ()


def test_transfers_that_overlap_are_busy_once(recorder, clock):
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(4):
        # Two threads at a time, then one alone: 40 ms in which anything moves, and 60 without.
        clock.milliseconds += 30
        recorder.offload("disk", "write", 300_000, 0.030)
        recorder.offload("disk", "write", 300_000, 0.030)
        clock.milliseconds += 10
        recorder.offload("disk", "write", 200_000, 0.015)
        clock.milliseconds += 60
        run_step(recorder, number)
    (write,) = snapshot().ranks[0].offload
    assert write.seconds_per_step == pytest.approx(0.040)
    assert write.bytes_per_second == pytest.approx(800_000 / 0.040)


def test_copies_of_one_stream_take_their_own_times_whenever_they_are_told_of(recorder, clock):
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(4):
        clock.milliseconds += 100
        for _ in range(3):  # all of them are found to be done at once
            recorder.offload("host", "write", 100_000, 0.010, is_alone=True)
        run_step(recorder, number)
    (write,) = snapshot().ranks[0].offload
    assert write.seconds_per_step == pytest.approx(0.030)
    assert write.bytes_per_second == pytest.approx(10_000_000)


def test_batches_of_one_optimizer_step_make_one_record(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(12):
        recorder.offload("host", "read", MIB, 0.001)
        recorder.begin_batch(index=number, epoch=0)
        recorder.end_batch(global_step=(number + 1) // 3, loss=None, samples=1, tokens=None)
    assert recorder._file.sequences["offload"] == 4
    (read,) = snapshot().ranks[0].offload
    assert read.bytes_per_step == 3 * MIB


def test_a_step_with_a_validation_says_nothing_of_the_others(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(9):
        recorder.offload("disk", "read", 100 * MIB if number == 4 else MIB, 0.0)
        run_step(recorder, number)
    (read,) = snapshot().ranks[0].offload
    assert (read.bytes_per_step, read.moved_bytes) == (MIB, 108 * MIB)


def test_what_moves_after_the_last_step_is_in_the_total_and_in_no_step(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(4):
        recorder.offload("disk", "write", MIB, 0.001)
        run_step(recorder, number)
    recorder.offload("disk", "write", 50 * MIB, 0.001)
    recorder.finish()
    (write,) = snapshot().ranks[0].offload
    assert (write.moved_bytes, write.bytes_per_step) == (54 * MIB, MIB)


def test_a_run_of_two_steps_has_a_bandwidth_and_no_median(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(2):
        recorder.offload("disk", "read", MIB, 1e-9)
        run_step(recorder, number)
    (read,) = snapshot().ranks[0].offload
    assert (read.bytes_per_step, read.seconds_per_step) == (None, None)
    assert read.bytes_per_second > 0


def test_totals_go_on_when_the_same_process_opens_its_file_again(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    recorder.offload("host", "read", MIB, 0.0)
    run_step(recorder, 0)
    recorder.close()
    again = Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})
    again.begin_loop(epoch=0, global_step=0)
    again.offload("host", "read", MIB, 0.0)
    run_step(again, 0)
    again.close()
    (read,) = snapshot().ranks[0].offload
    assert (read.calls, read.moved_bytes) == (2, 2 * MIB)


def test_threads_lose_no_transfer(recorder):
    recorder.begin_loop(epoch=0, global_step=0)

    def move():
        for _ in range(2000):
            recorder.offload("disk", "write", 3, 0.0)

    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run_step(recorder, 0)
    (write,) = snapshot().ranks[0].offload
    assert (write.calls, write.moved_bytes) == (8000, 24_000)


def test_a_place_that_does_not_exist_turns_telemetry_off_and_does_not_raise(recorder):
    with pytest.warns(RuntimeWarning, match="telemetry is off"):
        recorder.offload("tape", "write", 1, 0.0)
    assert not recorder.is_on
    recorder.offload("disk", "write", 1, 0.0)
    NullRecorder().offload("disk", "write", 1, 0.0)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.alone
def test_counting_a_transfer_costs_microseconds(recorder):
    begin = time.perf_counter()
    for _ in range(10_000):
        recorder.offload("disk", "write", 1, 0.0)
    assert (time.perf_counter() - begin) / 10_000 < 100e-6


def test_another_fit_of_the_process_begins_its_steps_anew():
    def moved(step, total):
        return OffloadRow(step, ((1, total, 10 * total), *((0, 0, 0),) * 3))

    records = [moved(90, 1000), moved(91, 5000), *(moved(n, 5000 + 100 * n) for n in range(5))]
    assert offload_totals(records) == (OffloadTotal("host", "read", 1, 5400, 100.0, 1e-6, 1e8),)


def test_records_that_no_run_has_are_refused():
    file = make_rank(make_job())
    file.offload(-1, [0] * 12)
    file.offload(3, [2**61] * 12)
    file.offload(3, [1] * 12)
    file.close()
    rank = snapshot().ranks[0]
    assert [each.moved_bytes for each in rank.offload] == [1] * len(layout.OFFLOAD_WAYS)
    assert rank.skipped_records == 2


def test_bytes_without_a_tensor_count_where_they_are_kept():
    found = measure(
        {
            "optimizer": [StoredBytes("disk", 700), torch.zeros(10), StoredBytes("host", 5)],
            "gradients": [StoredBytes("disk", 0)],
        },
        "host",
    )
    assert found == {
        ("optimizer", "host"): 45,
        ("optimizer", "disk"): 700,
        ("gradients", "host"): 0,
    }


def test_stored_bytes_are_seen_beside_the_tensors(recorder, monkeypatch):
    monkeypatch.setattr(memory, "MEMORY_EVERY_NS", 0)
    recorder.expect_memory([MemoryKind("optimizer", "disk", None, 900)])
    recorder.watch_memory(
        lambda: {"parameters": [torch.zeros(4)], "optimizer": [StoredBytes("disk", 900)]}
    )
    recorder.begin_loop(epoch=0, global_step=0)
    run_step(recorder, 0)
    recorder.finish()
    kinds = {(each.kind, each.place): each for each in snapshot().ranks[0].memory_kinds}
    assert kinds["optimizer", "disk"] == MemoryKind("optimizer", "disk", 900, 900)
    assert kinds["parameters", "host"].measured_bytes == 16
