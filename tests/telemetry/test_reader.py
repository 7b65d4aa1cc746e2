"""Finding jobs and reading them, in whatever state their files are."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from boltmesh.errors import TelemetryError
from boltmesh.process import ProcessId
from boltmesh.telemetry import layout
from boltmesh.telemetry.job import (
    JobInfo,
    job_path,
    make_private_folder,
    rank_file,
    run_dir,
    write_job,
)
from boltmesh.telemetry.reader.rank_reader import RankReader
from boltmesh.telemetry.reader.reader import list_jobs, open_job
from boltmesh.telemetry.snapshot import PHASES
from boltmesh.telemetry.writer.rank_file import RankFile

RUNNING, FINISHED, FAILED = map(layout.STATES.index, ("running", "finished", "failed"))


def make_job(job_id="abcd", *, world_size=1, mesh=None, **fields):
    info = JobInfo.create(
        strategy="DDPStrategy", mesh=mesh or {"data": world_size}, world_size=world_size, id=job_id
    )
    path = job_path(job_id)
    make_private_folder(run_dir())
    make_private_folder(path)
    write_job(msgspec.structs.replace(info, **fields), path)
    return path


def make_rank(path, rank=0, *, state=RUNNING, world_size=1, coordinates=None):
    file = RankFile(rank_file(path, rank), rank=rank, world_size=world_size)
    file.write_facts(
        {"host": "here", "device": "cpu", "coordinates": coordinates or {"data": rank}}
    )
    write_status(file, state)
    return file


def write_status(file, state, global_step=0):
    file.phase(PHASES.index("forward"))
    file.status(state, 0, 0, 1, global_step, 4, time.time(), 77, -1, -1, -1)


def write_step(file, number, *, ms=10, samples=8, loss=None, global_step=None, other=()):
    phases = [0] * len(PHASES)
    for name, time_ms in {"forward": ms, **dict(other)}.items():
        phases[PHASES.index(name)] = time_ms * 1_000_000
    global_step = number + 1 if global_step is None else global_step
    file.step(
        number,
        global_step,
        0,
        0 if loss is None else 1,
        time.time(),
        ms * 1_000_000,
        *phases,
        loss or 0.0,
        samples,
        -1,
    )


def snapshot(which=None):
    with open_job(which) as job:
        return job.snapshot()


def test_a_running_job_is_read_while_it_runs():
    path = make_job()
    file = make_rank(path)
    with open_job("abcd") as job:
        assert job.snapshot().ranks[0].steps == ()
        for number in range(5):
            write_step(file, number, loss=1.0 / (number + 1))
            file.point("loss", number + 1, 1.0 / (number + 1))
        seen = job.snapshot()
    rank = seen.ranks[0]
    assert (seen.state, rank.state, rank.phase, rank.host) == (
        "running",
        "running",
        "forward",
        "here",
    )
    assert [step.global_step for step in rank.steps] == [1, 2, 3, 4, 5]
    assert rank.steps[1].phases[2].seconds == pytest.approx(0.01)
    assert [point.value for point in seen.history] == [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert seen.metrics == {"loss": pytest.approx(0.2)}
    assert rank.memory.host_rss_bytes == 77
    assert rank.memory.device_peak_bytes is None
    assert rank.samples_per_second == pytest.approx(800)
    assert rank.tokens_per_second is None
    assert msgspec.json.decode(msgspec.json.encode(seen), type=type(seen)) == seen
    file.close()


def test_rates_are_summed_over_the_data_axis_and_counted_once_along_the_others():
    mesh = {"pipeline": 1, "data": 2, "tensor": 2}
    path = make_job(world_size=4, mesh=mesh)
    files = []
    for rank in range(4):
        coordinates = {"pipeline": 0, "data": rank // 2, "tensor": rank % 2}
        file = make_rank(path, rank, world_size=4, coordinates=coordinates)
        for number in range(3):
            write_step(file, number)
        files.append(file)
    assert snapshot().samples_per_second == pytest.approx(2 * 800)
    for file in files:
        file.close()


def test_what_a_step_moves_is_the_mean_after_the_warm_up_and_without_validation():
    file = make_rank(make_job())
    data, reduce = file.group_number("1", "data"), file.operator_number("allreduce")
    forward, validation = PHASES.index("forward"), PHASES.index("validation")

    def run_step(number, payload):
        for _ in range(2):
            ticket = file.enqueue(
                number + 1, data, reduce, forward, layout.TRAFFIC_IS_TIMED, payload
            )
            file.complete(ticket, time.monotonic_ns())
        file.enqueue(number + 1, data, reduce, validation, 0, 10**9)
        write_step(file, number)

    run_step(0, 10**6)
    run_step(1, 10**6)
    total = snapshot().ranks[0].collectives[0]
    assert (total.calls, total.calls_per_step, total.bytes_per_step) == (6, None, None)
    run_step(2, 100)
    run_step(3, 300)
    total = snapshot().ranks[0].collectives[0]
    assert (total.axis, total.operator) == ("data", "allreduce")
    assert (total.calls, total.payload_bytes) == (12, 4 * 10**6 + 800 + 4 * 10**9)
    assert (total.calls_per_step, total.bytes_per_step) == (2.0, 400.0)
    assert total.seconds_per_step is not None
    file.close()


@pytest.mark.parametrize("phase", ["validation", "checkpoint"])
def test_steps_that_validate_or_write_a_checkpoint_are_in_no_mean_of_a_step(phase):
    file = make_rank(make_job())
    data, reduce = file.group_number("1", "data"), file.operator_number("allreduce")
    for number in range(12):  # two batches a step; the last batch of the fourth step interrupts
        is_interrupted = number == 7
        # A gather before the phase begins belongs to it, and is recorded in the step's own phases.
        file.enqueue(number + 1, data, reduce, 2, 0, 5000 if is_interrupted else 50)
        write_step(
            file,
            number,
            global_step=(number + 1) // 2,
            other={phase: 1} if is_interrupted else {},
        )
    total = snapshot().ranks[0].collectives[0]
    assert (total.calls_per_step, total.bytes_per_step) == (2.0, 100.0)
    file.close()


def test_under_accumulation_a_step_is_an_optimizer_step():
    file = make_rank(make_job())
    data, reduce = file.group_number("1", "data"), file.operator_number("allreduce")
    for number in range(12):
        if number % 3 == 2:
            file.enqueue(number + 1, data, reduce, 2, 0, 100)
        write_step(file, number, global_step=(number + 1) // 3)
    total = snapshot().ranks[0].collectives[0]
    assert (total.calls_per_step, total.bytes_per_step) == (1.0, 100.0)
    assert total.seconds_per_step is None
    file.close()


def test_a_short_step_at_the_end_of_an_epoch_is_in_no_mean_of_a_step():
    file = make_rank(make_job())
    data, reduce = file.group_number("1", "data"), file.operator_number("allreduce")
    number = 0
    for step, batches in enumerate((4, 4, 4, 1, 4, 4, 4, 1, 2, 2, 2)):
        for batch in range(batches):
            file.enqueue(number + 1, data, reduce, 2, 0, 100)
            write_step(file, number, global_step=step + (batch == batches - 1))
            number += 1
        total = snapshot().ranks[0].collectives[0]
        if 4 <= step <= 7:
            assert (total.calls_per_step, total.bytes_per_step) == (4.0, 400.0)
    assert total.bytes_per_step == pytest.approx((4 * 400 + 3 * 200) / 7)  # two warm up
    file.close()


@pytest.mark.parametrize("batches", [1, 8, 64])
def test_rates_are_those_of_whole_accumulated_steps(batches):
    file = make_rank(make_job())
    with open_job() as job:
        for number in range(4 * batches + 20):
            is_last = (number + 1) % batches == 0
            write_step(file, number, ms=500 if is_last else 10, global_step=(number + 1) // batches)
            if number >= 4 * batches:
                rate = job.snapshot().samples_per_second
                assert rate == pytest.approx(8 * batches / (0.01 * batches + 0.49))
    file.close()


def test_a_collective_that_was_seen_in_flight_is_later_seen_done():
    file = make_rank(make_job())
    data, reduce = file.group_number("1", "data"), file.operator_number("allreduce")
    with open_job() as job:
        ticket = file.enqueue(1, data, reduce, 2, layout.TRAFFIC_IS_TIMED, 100)
        in_flight = job.snapshot().ranks[0].in_flight
        assert in_flight is not None
        assert (in_flight.axis, in_flight.sequence, in_flight.is_done) == ("data", 1, False)
        file.complete(ticket, time.monotonic_ns())
        in_flight = job.snapshot().ranks[0].in_flight
        assert in_flight is not None
        assert in_flight.is_done is True
    file.close()


def test_a_job_is_found_by_the_beginning_of_its_id_or_by_its_folder():
    path = make_job("abcd")
    make_job("abef")
    assert open_job("abc").path == path
    assert open_job(path).path == path
    assert open_job(str(path)).path == path
    assert open_job(path / "job.json").path == path
    with pytest.raises(TelemetryError, match="begins the id or the name of 2 jobs"):
        open_job("ab")
    with pytest.raises(TelemetryError, match="Did you mean 'abef'"):
        open_job("abeg")
    with pytest.raises(TelemetryError, match="'boltmesh jobs' lists them"):
        open_job("threed")


def test_without_a_name_the_newest_running_job_is_opened_else_the_newest():
    with pytest.raises(TelemetryError, match="there is no job"):
        open_job()
    make_rank(make_job("old", started=1.0), state=FINISHED).close()
    make_rank(make_job("new", started=3.0), state=FINISHED).close()
    assert open_job().path.name == "new"
    file = make_rank(make_job("middle", started=2.0))
    assert open_job().path.name == "middle"
    assert [(job.id, job.state) for job in list_jobs()] == [
        ("new", "finished"),
        ("middle", "running"),
        ("old", "finished"),
    ]
    file.close()


def test_folders_that_are_no_jobs_are_passed_over(tmp_path):
    make_job("good")
    (run_dir() / "empty").mkdir()
    (run_dir() / "file").write_text("")
    broken = run_dir() / "broken"
    broken.mkdir()
    (broken / "job.json").write_text("{")
    (broken / "job.json").chmod(0o600)
    (run_dir() / "linked").symlink_to(run_dir() / "good")
    assert [job.id for job in list_jobs()] == ["good"]


def test_escape_sequences_and_invisible_marks_of_a_job_do_not_reach_the_screen():
    evil = "\x1b]0;owned\x07a\x9b31mb\r\nc\u202ed\u200be\x00" + "x" * 10_000
    path = make_job(
        name=evil,
        user=evil,
        folder=evil,
        strategy=evil,
        command=(evil,),
        hyperparameters={evil: evil},
        versions={evil: evil},
        mesh={evil: 1},
    )
    file = RankFile(rank_file(path, 0), rank=0, world_size=1)
    expected = [
        {"axis": evil, "operator": evil, "payload_bytes": 1.0, "calls": None, "why": evil[:300]}
    ]
    file.write_facts(
        {
            "host": evil[:300],
            "device": evil[:300],
            "device_uuid": evil[:300],
            "coordinates": {evil[:50]: 0},
            "communication_note": evil[:300],
            "expected": expected,
            "checkpoint": evil[:300],
        }
    )
    file.enqueue(0, file.group_number(evil, evil), file.operator_number(evil), 0, 0, 1)
    file.point(evil, 0, 1.0)
    file.event("error", evil)
    seen = snapshot("abcd")
    text = msgspec.json.encode(seen).decode() + msgspec.json.encode(list_jobs()).decode()
    strings = [text, seen.name, seen.ranks[0].host, seen.events[0].message, *seen.metrics]
    for string in strings:
        assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in string)
        assert not {"\u202e", "\u200b"} & set(string)
    assert "\\u001b" not in text
    assert "\\u009b" not in text
    assert len(seen.folder) <= 500
    assert len(text) < 20_000
    file.close()


def start_rank(path, rank, world_size):
    """Start a process that writes a rank's file until it is killed."""
    script = f"""
        import sys, time
        from pathlib import Path
        from boltmesh.telemetry import layout
        from boltmesh.telemetry.job import rank_file
        from boltmesh.telemetry.writer.rank_file import RankFile
        path = rank_file(Path({str(path)!r}), {rank})
        file = RankFile(path, rank={rank}, world_size={world_size})
        file.write_facts({{"coordinates": {{"data": {rank}}}}})
        file.phase(3)
        file.status(1, 0, 0, 0, 41, 41, time.time(), 1, -1, -1, -1)
        data, reduce = file.group_number("1", "data"), file.operator_number("allreduce")
        file.enqueue(42, data, reduce, 3, layout.TRAFFIC_IS_TIMED, 100)
        print("ready", flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("state", ["crashed", "finished"])
def test_a_job_is_restarting_while_the_process_lives_that_starts_it_again(state):
    supervisor = subprocess.Popen(["sleep", "60"])
    path = make_job(restarted_by=ProcessId.of(supervisor.pid))
    if state == "finished":
        make_rank(path, state=FINISHED).close()
    else:
        with start_rank(path, 0, 1) as rank:
            rank.kill()
    try:
        with open_job() as job:
            seen = job.snapshot()
            assert seen.state == state
            assert seen.is_restarting == (state == "crashed")
            assert seen.is_over == (state == "finished")
            supervisor.kill()
            supervisor.wait()
            seen = job.snapshot()
            assert (seen.is_restarting, seen.is_over) == (False, True)
    finally:
        supervisor.kill()
        supervisor.wait()


def test_a_killed_rank_is_dead_at_once_and_named_with_where_it_was():
    path = make_job(world_size=2)
    processes = [start_rank(path, rank, 2) for rank in range(2)]
    try:
        with open_job() as job:
            assert job.snapshot().state == "running"
            os.kill(processes[1].pid, signal.SIGKILL)
            processes[1].wait()
            seen = job.snapshot()
            assert [rank.state for rank in seen.ranks] == ["running", "dead"]
            assert seen.state == "crashed"
            assert seen.cause == (
                "rank 1 is gone without recording an end, in backward after step 41, "
                "inside all_reduce number 1 of the data axis."
            )
            assert list_jobs()[0].state == "crashed"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("errors", "state"),
    [
        ({0: "ValueError: no"}, "failed"),
        ({0: "ValueError: no", 1: "RuntimeError: Connection reset by peer"}, "failed"),
        ({0: "SIGTERMException: 143", 1: "SIGTERMException: 143"}, "finished"),
        ({0: "SIGTERMException: 143"}, "failed"),
    ],
)
def test_the_list_tells_how_jobs_ended_without_their_steps(errors, state, monkeypatch):
    path = make_job(world_size=2)
    for number in range(2):
        file = make_rank(path, number, state=FAILED if number in errors else FINISHED)
        if number in errors:
            file.event("error", errors[number])
        file.close()
    with open_job() as job:
        seen = job.snapshot()
    assert seen.state == state
    monkeypatch.setattr(RankReader, "read", None)  # it is not called
    listed = list_jobs()[0]
    assert (listed.state, listed.stopped) == (state, seen.stop_reason is not None)


def test_a_zombie_is_dead():
    process = start_rank(make_job(), 0, 1)
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert snapshot().ranks[0].state == "dead"
    process.communicate()


@pytest.mark.parametrize("is_zombie", [False, True], ids=["reaped", "zombie"])
def test_a_lock_that_a_descendant_keeps_does_not_revive_its_rank(is_zombie):
    path = make_job()
    script = f"""
        import os, signal
        from pathlib import Path
        from boltmesh.telemetry.job import rank_file
        from boltmesh.telemetry.writer.rank_file import RankFile
        file = RankFile(rank_file(Path({str(path)!r}), 0), rank=0, world_size=1)
        file.write_facts({{}})
        os.set_inheritable(file._descriptor, True)
        child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
        print(child, flush=True)
    """
    run = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(run, stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if not is_zombie:
        process.wait()
    try:
        assert snapshot().ranks[0].state == "dead"
    finally:
        os.kill(child, signal.SIGKILL)
        process.wait()
        process.communicate()


def test_a_job_that_starts_anew_under_its_id_is_read_anew():
    path = make_job()
    process = start_rank(path, 0, 1)
    with open_job() as job:
        assert job.snapshot().ranks[0].global_step == 41
        process.kill()
        process.communicate()
        assert job.snapshot().state == "crashed"
        make_job()
        file = make_rank(path)
        seen = job.snapshot()
        assert (seen.state, seen.ranks[0].global_step) == ("running", 0)
        assert seen.ranks[0].collectives == ()
        file.close()


def test_an_open_job_survives_a_cleaner_of_the_temporary_folder():
    path = make_job()
    file = make_rank(path)
    with open_job() as job:
        before = job.snapshot()
        for each in path.iterdir():
            each.unlink()
        path.rmdir()
        after = job.snapshot()
    assert after.ranks[0].state == before.ranks[0].state == "running"
    file.close()


def test_reading_loads_neither_torch_nor_lightning_nor_textual():
    script = (
        "import sys, boltmesh.telemetry.reader.reader\n"
        "print(*sorted({'torch', 'lightning', 'textual', 'psutil'} & set(sys.modules)))"
    )
    run = [sys.executable, "-c", script]
    said = subprocess.run(run, capture_output=True, text=True, check=True, cwd=Path.home()).stdout
    assert said.strip() == ""


def test_a_job_of_which_nothing_is_left_is_not_called_running_for_long():
    make_job("young")
    make_job("old", started=time.time() - 1000)
    states = {each.id: each.state for each in list_jobs()}
    assert states == {"young": "running", "old": "crashed"}
    with open_job("old") as job:
        assert job.snapshot().cause == "no rank of it has left telemetry that can be read."


def test_a_damaged_number_of_ranks_makes_no_job_large():
    path = make_job(world_size=2)
    file = make_rank(path, 0, world_size=2)
    content = msgspec.json.decode((path / "job.json").read_bytes())
    (path / "job.json").write_bytes(msgspec.json.encode({**content, "world_size": 2**40}))
    with open_job("abcd") as job:
        assert len(job.snapshot().ranks) == 2
    file.close()
