"""The recorder: what it writes, and that its own failures never reach training."""

import errno
import os
import signal
import threading
import time
from statistics import fmean
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.job import JobInfo, run_dir
from boltmesh.telemetry.reader.reader import list_jobs, open_job
from boltmesh.telemetry.redaction import redact_mapping
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.telemetry.writer import status_line, step_queue
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.rank_file import RankFile
from boltmesh.telemetry.writer.recorder import Recorder, open_recorder
from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES

CPU = torch.device("cpu")
torch_distributed: Any = dist


def make_info(job_id="abcd"):
    return JobInfo.create(strategy="DDPStrategy", mesh={"data": 1}, world_size=1, id=job_id)


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(step_queue, "WRITE_EVERY_NS", 0)
    recorder = open_recorder(make_info(), rank=0, local_rank=0, device=CPU, coordinates={"data": 0})
    assert isinstance(recorder, Recorder)
    yield recorder
    recorder.close()
    assert not COLLECTIVES.is_installed


def snapshot():
    with open_job("abcd") as job:
        return job.snapshot()


def run_step(recorder, number, loss=None, samples=4, tokens=None):
    recorder.begin_batch(index=number, epoch=0)
    with recorder.phase("optimizer"):
        with recorder.phase("forward"):
            pass
        with recorder.phase("backward"):
            pass
    recorder.end_batch(global_step=number + 1, loss=loss, samples=samples, tokens=tokens)


def test_trends_are_means_of_ordinary_steps_and_no_metrics(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(16):
        if number == 12:
            with recorder.phase("validation"):
                time.sleep(0.3)
        recorder.trend("bubble_ratio", number / 100)
        run_step(recorder, number, tokens=128)
        recorder._file.payload_bytes += 1000
    seen = snapshot()
    found: dict[str, dict[int, float]] = {}
    for point in seen.trends:
        found.setdefault(point.name, {})[point.global_step] = point.value
    found.pop("utilisation_percent", None)  # measured where the steps take long
    names = ("step_s", "tokens_per_s", "memory_bytes", "wall_s", "bubble_ratio")
    assert {name: list(points) for name, points in found.items()} == {
        name: [8, 16] for name in names
    } | {"bytes_per_s": [16]}
    passed_s = found["wall_s"][16] - found["wall_s"][8]
    assert found["bytes_per_s"][16] == pytest.approx(8000 / passed_s)
    assert found["bubble_ratio"] == {8: 0.07, 16: 0.15}
    steps = seen.ranks[0].steps
    assert found["step_s"][8] == pytest.approx(sum(step.seconds for step in steps[:8]) / 8)
    ordinary_s = sum(step.seconds for step in (*steps[8:12], *steps[13:16]))
    assert found["step_s"][16] == pytest.approx(ordinary_s / 7)
    assert found["tokens_per_s"][8] == pytest.approx(128 / found["step_s"][8])
    assert not any("trend" in name for name in (*seen.metrics, *(p.name for p in seen.history)))


@pytest.mark.parametrize(
    ("batches", "windows"),
    [
        (1, [(0, 8), (8, 16), (16, 24), (24, 32)]),
        (3, [(0, 8), (8, 17), (17, 26)]),
        # Until two steps have ended it is not known how many batches a step has.
        (10, [(24, 34), (34, 44)]),
    ],
)
def test_the_recorded_step_time_is_of_whole_optimizer_steps(recorder, batches, windows):
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(windows[-1][1]):
        recorder.begin_batch(index=number, epoch=0)
        step = (number + 1) // batches
        with recorder.phase("forward"):
            time.sleep(0.03 if batches > 1 and step * batches == number + 1 else 0.001)
        recorder.end_batch(global_step=step, loss=None, samples=4, tokens=None)
    seen = snapshot()
    found = [point.value for point in seen.trends if point.name == "step_s"]
    steps = seen.ranks[0].steps
    means = [fmean(step.seconds for step in steps[first:last]) for first, last in windows]
    assert found == pytest.approx([batches * mean for mean in means])


def test_a_strategy_that_chooses_is_shown_with_its_choice(recorder):
    assert snapshot().strategy == "DDPStrategy"
    recorder.chose("AutoStrategy: bolt_zero3")
    assert snapshot().strategy == "AutoStrategy: bolt_zero3"


def test_a_run_is_recorded_from_start_to_end(recorder):
    assert snapshot().ranks[0].state == "starting"
    recorder.expect([ExpectedTraffic("data", "allreduce", 8.0, None, "gradients")])
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(4):
        run_step(recorder, number, loss=torch.tensor(0.5 * number), tokens=128)
    recorder.metrics(4, {"accuracy": torch.tensor(0.75), "lr": 0.1, "vector": torch.ones(3)})
    recorder.event("checkpoint", "/tmp/x.ckpt")
    seen = snapshot()
    rank = seen.ranks[0]
    assert (seen.state, rank.state, rank.global_step) == ("running", "running", 4)
    assert [step.loss for step in rank.steps] == [0.0, 0.5, 1.0, 1.5]
    assert all(
        sum(phase.seconds for phase in step.phases) == pytest.approx(step.seconds)
        for step in rank.steps
    )
    assert seen.metrics == {"loss": 1.5, "accuracy": 0.75, "lr": 0.1}
    assert seen.tokens_per_second == pytest.approx(32 * seen.samples_per_second)
    assert seen.expected == (ExpectedTraffic("data", "allreduce", 8.0, None, "gradients"),)
    assert seen.checkpoint == "/tmp/x.ckpt"
    assert rank.memory.host_rss_bytes > 10**7
    assert rank.memory.device_allocated_bytes is None
    assert rank.device == "cpu"
    recorder.close()
    seen = snapshot()
    assert (seen.state, seen.cause) == ("finished", None)
    assert [event.kind for event in seen.events] == ["start", "checkpoint", "end"]


def test_a_loss_that_is_not_a_number_is_kept_and_an_unknown_one_is_not_zero(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    run_step(recorder, 0, loss=float("nan"))
    run_step(recorder, 1, loss=None, samples=None)
    first, second = snapshot().ranks[0].steps
    assert first.loss != first.loss
    assert (second.loss, second.samples, second.tokens) == (None, None, None)


def test_an_exception_is_told_with_the_phase_that_it_came_from(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    run_step(recorder, 0)
    error = ValueError("\n\nbad batch\nsecond line")

    def train():
        recorder.begin_batch(index=1, epoch=0)
        with recorder.phase("optimizer"), recorder.phase("forward"):
            raise error

    with pytest.raises(ValueError, match="bad"):
        train()
    recorder.fail(error)
    recorder.finish()
    recorder.close()
    seen = snapshot()
    assert seen.state == "failed"
    assert seen.cause == "rank 0 failed in forward after step 1: ValueError: bad batch"
    assert seen.ranks[0].error == "ValueError: bad batch"


def test_an_error_without_words_is_named_by_its_type(recorder):
    recorder.fail(KeyboardInterrupt())
    assert snapshot().ranks[0].error == "KeyboardInterrupt"


def test_what_was_before_the_loop_is_no_part_of_the_first_step(recorder):
    with recorder.phase("forward"):
        time.sleep(0.01)
    begins = time.monotonic()
    recorder.begin_loop(epoch=0, global_step=0)
    run_step(recorder, 0)
    ended = time.monotonic()
    step = snapshot().ranks[0].steps[0]
    assert 0 < step.seconds < ended - begins + 1e-6


def test_telemetry_is_off_when_the_environment_says_so(monkeypatch):
    for word in ("0", "false", "OFF"):
        monkeypatch.setenv("BOLTMESH_TELEMETRY", word)
        found = open_recorder(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})
        assert isinstance(found, NullRecorder)
    assert not run_dir().exists()


def test_the_null_recorder_takes_whatever_the_recorder_takes():
    public = {name for name in dir(Recorder) if not name.startswith("_")}
    internal = {"open", "turn_off"}
    assert public - internal <= set(dir(NullRecorder))
    null = NullRecorder()
    null.begin_loop(epoch=0, global_step=0)
    run_step(null, 0)
    with pytest.raises(KeyError), null.phase("forward"):
        raise KeyError
    null.metrics(1, {})
    null.event("warning", "x")
    null.name_group(cast("dist.ProcessGroup", None), "data")
    null.expect([])
    null.rank_died(0, 1)
    null.end_loop()
    null.fail(ValueError())
    null.finish()
    null.close()


def open_under(patch):
    patch()
    with pytest.warns(RuntimeWarning, match="boltmesh telemetry is off") as caught:
        found = open_recorder(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})
    assert len(caught) == 1
    assert isinstance(found, NullRecorder)
    assert not COLLECTIVES.is_installed
    return str(caught[0].message)


def test_a_run_directory_that_cannot_be_made_is_one_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    said = open_under(
        lambda: monkeypatch.setenv("BOLTMESH_RUN_DIR", str(tmp_path / "file" / "below"))
    )
    assert "NotADirectoryError" in said or "not a folder" in said


def test_a_full_disk_at_the_start_is_one_warning(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert "No space left" in open_under(lambda: monkeypatch.setattr(os, "posix_fallocate", full))


def test_a_counter_that_breaks_while_it_is_installed_is_one_warning(monkeypatch):
    def broken():
        raise RuntimeError("torch is not what it was")

    monkeypatch.setattr("boltmesh.telemetry.writer.communication.uncounted_operators", broken)
    assert "torch is not what it was" in open_under(lambda: None)


METHODS = {
    "status": lambda recorder: recorder.begin_loop(epoch=0, global_step=0),
    "phase": lambda recorder: recorder.begin_batch(index=0, epoch=0),
    "step": lambda recorder: run_step(recorder, 0),
    "point": lambda recorder: recorder.metrics(1, {"x": 1.0}),
    "event": lambda recorder: recorder.event("warning", "x"),
    "write_facts": lambda recorder: recorder.expect([]),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), ValueError("x"), TelemetryError("y")]
)
def test_a_failure_in_the_middle_turns_telemetry_off_with_one_warning(
    recorder, monkeypatch, method, error
):
    def broken(*_):
        raise error

    monkeypatch.setattr(RankFile, method, broken)
    with pytest.warns(RuntimeWarning, match="boltmesh telemetry is off"):
        METHODS[method](recorder)
    METHODS[method](recorder)  # a second warning would be an error
    with recorder.phase("forward"):
        pass
    recorder.fail(ValueError())
    assert not recorder.is_on
    if method not in {"status", "phase"}:
        monkeypatch.undo()
        assert snapshot().state == "failed"


def test_a_phase_that_breaks_does_not_swallow_the_error_of_training(recorder, monkeypatch):
    def broken(*_):
        raise OSError("broken")

    monkeypatch.setattr(RankFile, "phase", broken)
    with (
        pytest.warns(RuntimeWarning, match="telemetry is off"),
        pytest.raises(KeyError),
        recorder.phase("forward"),
    ):
        raise KeyError


def test_a_collective_goes_on_when_counting_it_breaks(recorder, monkeypatch):
    store = torch_distributed.HashStore()
    group: Any = dist.ProcessGroup(store, 0, 1)
    gloo = torch_distributed.ProcessGroupGloo(store, 0, 1)
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name("alone")
    recorder.name_group(group, "data")
    value = torch.full((2,), 3.0)
    group.allreduce([value]).wait()

    def broken(*_):
        raise OSError("broken")

    monkeypatch.setattr(RankFile, "enqueue", broken)
    with pytest.warns(RuntimeWarning, match="telemetry is off"):
        group.allreduce([value]).wait()
    group.allreduce([value]).wait()  # a second warning would be an error
    assert value.tolist() == [3.0, 3.0]


def test_phases_of_another_thread_are_not_recorded(recorder):
    def elsewhere():
        with recorder.phase("forward"):
            seen.append(snapshot().ranks[0].phase)

    seen: list[str | None] = []
    with recorder.phase("checkpoint"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen == ["checkpoint"]


def test_who_is_killed_has_the_step_that_ended_last(monkeypatch):
    for module, name in ((step_queue, "WRITE_EVERY_NS"), (status_line, "STATUS_EVERY_NS")):
        monkeypatch.setattr(module, name, 10**12)  # as long as two steps of a fast model
    recorder = Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})
    recorder.begin_loop(epoch=0, global_step=7)
    assert snapshot().global_step == 7
    for number in range(7, 10):
        run_step(recorder, number)
    seen = snapshot()
    assert (seen.global_step, seen.ranks[0].global_step) == (10, 10)
    assert list_jobs()[0].global_step == 10
    recorder.close()


def test_a_second_recorder_of_the_process_goes_on_in_the_same_job(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    run_step(recorder, 0, loss=1.0)
    recorder.close()
    assert snapshot().state == "finished"
    again = Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={})
    assert snapshot().state == "running"
    again.begin_loop(epoch=1, global_step=1)
    run_step(again, 1, loss=2.0)
    again.close()
    seen = snapshot()
    assert [step.loss for step in seen.ranks[0].steps] == [1.0, 2.0]
    assert [point.value for point in seen.history] == [1.0, 2.0]
    assert seen.state == "finished"


def test_a_second_fit_of_the_process_replaces_the_first_in_the_same_job(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    for number in range(3):
        run_step(recorder, number, loss=1.0)
    recorder.close()
    again = Recorder.open(
        make_info(), rank=0, local_rank=0, device=CPU, coordinates={}, is_fit=True
    )
    again.begin_loop(epoch=0, global_step=0)
    run_step(again, 0, loss=2.0)
    again.close()
    Recorder.open(make_info(), rank=0, local_rank=0, device=CPU, coordinates={}).close()
    seen = snapshot()  # the evaluation belongs to the second fit
    assert (seen.state, seen.global_step) == ("finished", 1)
    assert [step.loss for step in seen.ranks[0].steps] == [2.0]
    assert [(point.global_step, point.value) for point in seen.history] == [(1, 2.0)]


def test_the_death_of_another_rank_is_noted(recorder):
    recorder.rank_died(0, -9)
    assert snapshot().state == "running"  # rank 0 lives: the note is of nobody who is dead


def test_a_rank_whose_telemetry_went_off_does_not_look_dead_when_it_ends_well(recorder):
    recorder.begin_loop(epoch=0, global_step=0)
    with pytest.warns(RuntimeWarning, match="off for this process: too bad"):
        recorder.turn_off(TelemetryError("too bad"))
    recorder.close()
    seen = snapshot()
    assert seen.state == "finished"
    assert "telemetry is off" in seen.events[1].message


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def test_an_error_that_cannot_say_what_it_is_is_named_by_its_type(recorder):
    recorder.fail(MuteError())
    assert snapshot().ranks[0].error == "MuteError"


def test_a_hyperparameter_that_cannot_be_shown_is_named_by_its_type():
    class Shy:
        def __str__(self):
            raise RuntimeError("not this")

    assert redact_mapping({"model": Shy(), "width": 3}) == {"model": "<Shy>", "width": "3"}


def test_a_checkpoint_path_may_be_no_text_and_longer_than_there_is_room_for(recorder):
    recorder.event("checkpoint", "runs/\udcff.ckpt")
    assert snapshot().checkpoint == "runs/\\udcff.ckpt"
    recorder.event("checkpoint", "x" * 100_000)
    assert recorder.is_on
    assert snapshot().checkpoint.startswith("xxx")


def test_a_signal_handler_may_record_while_its_thread_records(recorder):
    """Lightning communicates and saves in its handlers, on top of whatever ran."""
    number = 0

    def handle(*_):
        nonlocal number
        number += 1
        recorder.event("warning", f"signal {number}")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        recorder.begin_loop(epoch=0, global_step=0)
        begun = time.monotonic()
        step = 0
        while number <= 100 or time.monotonic() - begun < 1.0:
            step += 1
            recorder._file.enqueue(step, 0, 0, 3, 0, 4)
            recorder._file.event("warning", "own")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert recorder.is_on
