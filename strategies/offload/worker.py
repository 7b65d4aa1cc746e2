"""The thread that steps offloaded state while the training thread goes on.

One thread is enough: the kernels and the disk release the interpreter's lock, and the kernels are
parallel inside. Norms are urgent, since the training thread waits for them before it can clip.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from boltmesh.strategies.offload.device_copy import use_device

CPU = torch.device("cpu")


class Job:
    """Something for the worker to do, once."""

    def __init__(self, run: Callable[[], None], chunk: object = None) -> None:
        self.chunk = chunk
        self._run = run
        self._is_done = threading.Event()

    def wait(self) -> None:
        """Return when it has run, or when it never will."""
        self._is_done.wait()

    @property
    def is_done(self) -> bool:
        """Whether it has run."""
        return self._is_done.is_set()

    def run(self) -> None:
        """Do it, on the worker."""
        try:
            self._run()
        finally:
            self._run = _nothing  # holds gradients
            self._is_done.set()

    def drop(self) -> None:
        """It will never run."""
        self._run = _nothing
        self.chunk = None  # holds its store, and the thread its last job
        self._is_done.set()


class Worker:
    """Runs jobs one after the other on a thread of its own; the first error stops all."""

    def __init__(
        self,
        *,
        num_threads: int,
        look_ahead: Callable[[Sequence[Job]], None] | None = None,
        device: torch.device = CPU,
        name: str = "boltmesh-offload",
    ) -> None:
        """Start the thread.

        Args:
            num_threads: What torch may use inside of one operator there.
            look_ahead: Called on the worker before each job with those that follow.
            device: What jobs work with.
            name: Of the thread.
        """
        self._num_threads = num_threads
        self._look_ahead = look_ahead
        self._device = device
        self._jobs: deque[Job] = deque()
        self._urgent: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, *, is_urgent: bool = False) -> Job:
        """Queue a job, before those that are not urgent if it is."""
        self.raise_error()
        with self._changed:
            (self._urgent if is_urgent else self._jobs).append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> bool:
        """Take a job out of the queue. False when it has begun: then wait for it."""
        with self._changed:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
        job.drop()
        return True

    def drain(self) -> None:
        """Return when nothing is left to do.

        Raises:
            BaseException: The first that a job raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: not (self._jobs or self._urgent or self._is_busy))
        self.raise_error()

    def raise_error(self) -> None:
        """Raise what a job raised, at each call: nothing after it can be trusted."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread; jobs that have not begun are dropped."""
        with self._changed:
            self._is_closed = True
            self._drop_all()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _drop_all(self) -> None:
        for job in (*self._urgent, *self._jobs):
            job.drop()
        self._urgent.clear()
        self._jobs.clear()

    def _next(self) -> Job | None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs or self._urgent or self._is_closed)
            if self._is_closed:
                return None
            self._is_busy = True
            return (self._urgent or self._jobs).popleft()

    def _following(self) -> list[Job]:
        with self._changed:
            return list(self._jobs)

    def _work(self) -> None:
        use_device(self._device)
        torch.set_num_threads(self._num_threads)  # holds for the calling thread
        with torch.no_grad():
            while (job := self._next()) is not None:
                self._run(job)

    def _run(self, job: Job) -> None:
        try:
            if self._look_ahead is not None and job.chunk is not None:
                self._look_ahead([job, *self._following()])
            job.run()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            with self._changed:
                self._error = self._error or error
                self._drop_all()
        finally:
            job.drop()  # in case that looking ahead failed, and it has not run


def worker_threads(device: torch.device, ranks_per_node: int) -> int:
    """What the worker may use of the host: beside an accelerator, the cores less two."""
    if device.type == "cpu":
        return torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // max(1, ranks_per_node) - 2)


def _nothing() -> None:
    pass
