"""The worker runs jobs in order, urgent ones first, and hands its first error on."""

import threading
from collections.abc import Iterator

import pytest
import torch

from boltmesh.strategies.offload.stepper import Worker, WorkerTask


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(num_threads=1)
    yield made
    made.close()


def held_up(worker: Worker) -> tuple[threading.Event, WorkerTask]:
    """Keep the worker busy until the event is set."""
    begun, free = threading.Event(), threading.Event()

    def stand() -> None:
        begun.set()
        free.wait(10)

    job = worker.submit(WorkerTask(stand))
    assert begun.wait(10)
    return free, job


def test_jobs_run_in_order_and_urgent_ones_before_them(worker: Worker) -> None:
    free, _ = held_up(worker)
    done: list[str] = []
    for name in ("first", "second"):
        worker.submit(WorkerTask(lambda name=name: done.append(name)))  # type: ignore[misc]
    worker.submit(WorkerTask(lambda: done.append("urgent")), is_urgent=True)
    free.set()
    worker.drain()
    assert done == ["urgent", "first", "second"]


def test_an_urgent_job_that_would_wait_for_the_device_lets_others_go_first(worker: Worker) -> None:
    free, _ = held_up(worker)
    done: list[str] = []
    is_ready = lambda: "second" in done  # noqa: E731
    urgent = WorkerTask(lambda: done.append("urgent"), is_ready=is_ready)
    worker.submit(urgent, is_urgent=True)
    for name in ("first", "second", "third"):
        worker.submit(WorkerTask(lambda name=name: done.append(name)))  # type: ignore[misc]
    free.set()
    worker.drain()
    assert done == ["first", "second", "urgent", "third"]
    never = WorkerTask(lambda: done.append("alone"), is_ready=lambda: False)
    worker.submit(never, is_urgent=True)
    worker.drain()
    assert done[-1] == "alone"


def test_a_job_that_has_not_begun_can_be_cancelled_and_no_other(worker: Worker) -> None:
    free, running = held_up(worker)
    done: list[str] = []
    waiting = worker.submit(WorkerTask(lambda: done.append("ran")))
    assert worker.cancel(waiting)
    assert waiting.is_done
    assert not worker.cancel(running)
    free.set()
    worker.drain()
    assert done == []
    assert not worker.cancel(running)


def test_the_first_error_is_raised_from_then_on_and_nothing_runs_after_it(worker: Worker) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    free, _ = held_up(worker)
    done: list[str] = []
    failing = worker.submit(WorkerTask(fail))
    after = worker.submit(WorkerTask(lambda: done.append("ran")))
    free.set()
    failing.wait()
    after.wait()
    for call in (worker.drain, worker.raise_error, lambda: worker.submit(WorkerTask(lambda: None))):
        with pytest.raises(OSError, match="the disk is gone"):
            call()
    assert done == []


def test_it_is_told_what_follows_before_each_job() -> None:
    seen: list[list[object]] = []
    worker = Worker(num_threads=1, look_ahead=lambda jobs: seen.append([j.chunk for j in jobs]))
    try:
        free, _ = held_up(worker)
        for chunk in (1, 2, 3):
            worker.submit(WorkerTask(lambda: None, chunk))
        free.set()
        worker.drain()
    finally:
        worker.close()
    assert seen == [[1, 2, 3], [2, 3], [3]]


def test_an_error_while_looking_ahead_ends_the_job_too() -> None:
    def fail(jobs: object) -> None:
        raise OSError("cannot read ahead")

    worker = Worker(num_threads=1, look_ahead=fail)
    try:
        job = worker.submit(WorkerTask(lambda: None, 1))
        job.wait()
        with pytest.raises(OSError, match="cannot read ahead"):
            worker.drain()
    finally:
        worker.close()


def test_its_number_of_threads_is_its_own(worker: Worker) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    other = Worker(num_threads=before + 1)
    try:
        other.submit(WorkerTask(lambda: seen.append(torch.get_num_threads())))
        other.drain()
    finally:
        other.close()
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_closing_releases_those_who_wait(worker: Worker) -> None:
    free, _ = held_up(worker)
    waiting = worker.submit(WorkerTask(lambda: None))
    closing = threading.Thread(target=worker.close)
    closing.start()
    waiting.wait()
    free.set()
    closing.join(10)
    assert not closing.is_alive()
