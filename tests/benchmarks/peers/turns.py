"""How a benchmark lets several engines take turns: each in a process of its own, one at a time.

The parent tells one process how many steps to run and waits for its report. A turn begins and ends
with nothing under way, so an engine that works in the background pays for all of it, and nothing
of it falls into the turn of another.
"""

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.peers.resident import forget_peak, resident_bytes


@dataclass
class Report:
    """One turn."""

    step_s: float = 0.0
    """A whole step: forward, backward and optimizer, the mean of the turn."""
    after_backward_s: float = 0.0
    """From the end of backward until the next step may begin."""
    cpu_s: float = 0.0
    """Of all threads of the process, in a step: says the same on a busy machine."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Gradient norms before clipping."""
    peak_bytes: int = 0
    """Largest resident set of the process since its first turn began."""


class Turns:
    """The side of the engine: asks before each step, says when backward is over and what it made.

    Args:
        connection: To the parent.
        drain: Returns when nothing of the steps so far is under way.
    """

    def __init__(self, connection: Connection, drain: Callable[[], None] = lambda: None) -> None:
        self._connection, self._drain = connection, drain
        self._report = Report()
        self._length = self._left = 0
        self._started = self._started_cpu = self._backward_ended = 0.0

    def begin_step(self) -> bool:
        """Wait for this engine's turn. False when the benchmark is over."""
        if self._left == 0:
            if self._length:
                self._end_turn()
            else:
                forget_peak()
            self._length = self._left = pickle.loads(self._connection.recv_bytes())
            self._report = Report()
            self._started, self._started_cpu = time.perf_counter(), time.process_time()
        elif self._backward_ended:
            self._report.after_backward_s += time.perf_counter() - self._backward_ended
        self._backward_ended = 0.0
        self._left -= 1
        return self._left >= 0

    def end_backward(self) -> None:
        self._backward_ended = time.perf_counter()

    def end_step(self, loss: float, norm: float) -> None:
        self._report.losses.append(loss)
        self._report.norms.append(norm)

    def _end_turn(self) -> None:
        self._drain()
        now = time.perf_counter()
        if self._backward_ended:
            self._report.after_backward_s += now - self._backward_ended
        self._report.step_s = (now - self._started) / self._length
        self._report.after_backward_s /= self._length
        self._report.cpu_s = (time.process_time() - self._started_cpu) / self._length
        self._report.peak_bytes = resident_bytes("VmHWM")
        self._connection.send_bytes(pickle.dumps((self._report, None)))


class Contestant:
    """The side of the parent.

    Args:
        train: ``train(connection, *args)``, a module-level function that asks ``Turns`` for steps.
        args: What it is given.
        threads: Of torch and OpenMP in that process.
        environment: Variables of that process, set before it starts.
    """

    def __init__(
        self,
        train: Callable[..., None],
        args: Iterable[object],
        *,
        threads: int,
        environment: dict[str, str] | None = None,
    ) -> None:
        context = get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(
            target=_main, args=(there, train, tuple(args), threads), daemon=True
        )
        before = dict(os.environ)
        os.environ.update(environment or {}, OMP_NUM_THREADS=str(threads))
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        there.close()
        self.losses: list[float] = []
        """Of all steps so far."""
        self.norms: list[float] = []

    def run(self, steps: int) -> Report:
        """Give this engine a turn.

        Raises:
            RuntimeError: With its traceback, when it failed.
        """
        self._connection.send_bytes(pickle.dumps(steps))
        try:
            report: Report | None
            report, failure = pickle.loads(self._connection.recv_bytes())
        except EOFError:
            self._process.join()
            raise RuntimeError(f"died with exit code {self._process.exitcode}") from None
        if report is None:
            raise RuntimeError(failure)
        self.losses += report.losses
        self.norms += report.norms
        return report

    def close(self) -> None:
        if self._process.is_alive():
            self._connection.send_bytes(pickle.dumps(0))
        self._process.join(60.0)
        if self._process.is_alive():
            self._process.kill()


def _main(
    connection: Connection, train: Callable[..., None], args: tuple[Any, ...], threads: int
) -> None:
    torch.set_num_threads(threads)
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        GLOO_SOCKET_IFNAME="lo",
    )
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
            timeout=timedelta(minutes=10),
        )
        try:
            train(connection, *args)
        except BaseException:  # noqa: BLE001 - the parent raises it
            connection.send_bytes(pickle.dumps((None, traceback.format_exc())))
        finally:
            dist.destroy_process_group()
