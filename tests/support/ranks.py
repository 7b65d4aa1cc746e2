"""Starts ranks for a test, cheaply: a fork server holds torch and Lightning already imported.

``run_ranks(worker, 2, *args)`` calls the module-level function ``worker(rank, world_size, *args)``
in two processes that share an initialised gloo group, and returns what each rank returned. The
environment of a rank looks like torchrun's, so a Trainer built by the worker joins and launches
nothing. A failing rank raises ``RankFailure`` in the test, with the rank and its traceback;
nothing outlives ``timeout_s``.

``reuse_ranks`` does the same in ranks that stay up: the next call that wants as many finds all that
torch and Lightning set up and cached at the first use, which is a third of what a small run costs.
It is for workers that change nothing but what they are given.
"""

import gc
import multiprocessing
import os
import pickle
import random
import shutil
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

PRELOAD = [
    "pytest",
    "torch.distributed.checkpoint.format_utils",
    "boltmesh.check.parity",
    "boltmesh.run",
    "boltmesh.strategies.checkpoint.directory",
    "boltmesh.strategies.ddp",
    "boltmesh.strategies.offload.engine",
    "boltmesh.strategies.parallel_3d",
    "boltmesh.strategies.pipeline.runtime.runtime",
    "boltmesh.strategies.zero",
    "boltmesh.telemetry.callback",
    "boltmesh.telemetry.reader.reader",
    "torch.distributed.pipelining.schedules",
    "tests.support.causal_training",
    "tests.support.gpts",
    "tests.support.models",
    "tests.support.ranks",
    "tests.support.sharded",
    "tests.support.stack",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
]
"""What ranks of tests import, and with that torch and Lightning. One that is missing is ignored.

Imported here it costs once what it would cost each of a few thousand ranks: a seventh of a second
for the doors of pipeline and tensor, a second for what Hugging Face's models need.
"""

LIMIT_S = 600.0
"""Of ranks that hang: a machine that is shared takes ten times as long as a quiet one."""

GRACE_S = 3.0
"""How long the other ranks may take to tell their side once one has failed."""

JOINS = 3
"""How often the ranks of a job are started if gloo cannot connect them.

A machine under load closes a connection between two of them now and then, before the test begins.
"""

CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "timed out")
"""A rank that says this lost a peer; the peer is the cause."""


_STARTING = threading.Lock()


class UnconnectedError(RuntimeError):
    """gloo could not connect the ranks of a test."""


class RankFailure(AssertionError):  # noqa: N818 - what a test reports, not an error of ours
    """A rank raised, died or did not finish in time."""


@dataclass
class _Rank:
    rank: int
    process: BaseProcess
    connection: Connection
    result: Any = None
    error: str | None = None
    is_done: bool = False
    is_unconnected: bool = False
    """gloo could not connect it with the others, so its worker did not begin."""

    def collect(self) -> None:
        """Take the report of a rank that has sent one or has died."""
        if self.is_done:
            return
        self.is_done = True
        try:
            outcome, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE_S)
            self.error = f"died with exit code {self.process.exitcode} and reported nothing"
            return
        if outcome == "ok":
            self.result = value
        else:
            self.error = value
            self.is_unconnected = outcome == "unconnected"


def run_ranks(
    worker: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout_s: float = LIMIT_S,
    grace_s: float = GRACE_S,
) -> list[Any]:
    """Run ``worker(rank, world_size, *args)`` on every rank and return the results by rank.

    ``grace_s`` is for tests that look at what the others say when one has failed.
    """
    for _ in range(JOINS):
        ranks = _run_once(worker, world_size, args, timeout_s, grace_s)
        if not any(each.is_unconnected for each in ranks):
            break
    _raise_first_cause(ranks)
    return [each.result for each in ranks]


def reuse_ranks(
    worker: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout_s: float = LIMIT_S,
    grace_s: float = GRACE_S,
) -> list[Any]:
    """Run as ``run_ranks`` does, in ranks of an earlier call, which stay for the next one.

    They end with the first call that fails, after ``MOST_JOBS``, and with the tests of a file.
    """
    for _ in range(JOINS):
        standing = _standing.pop(world_size, None)
        if standing is not None and not standing.is_alive():
            standing.end()
            standing = None
        standing = standing or _Standing(world_size)
        ranks = standing.run(worker, args, timeout_s, grace_s)
        if standing.num_jobs < MOST_JOBS and not any(each.error for each in ranks):
            _standing[world_size] = standing
        else:
            standing.end()
        if not any(each.is_unconnected for each in ranks):
            break
    _raise_first_cause(ranks)
    return [each.result for each in ranks]


MOST_JOBS = 12
"""Of ranks that stay: each run leaves groups behind, with their threads and connections."""

_Started = list[tuple[BaseProcess, Connection]]


class _Standing:
    """Ranks that stay up, with one default group for all that they run.

    torch keeps groups in caches of its own, so that none of them may be destroyed in between.
    """

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._processes = _start(_stand, world_size)
        self.num_jobs = 0

    def is_alive(self) -> bool:
        """Return whether all wait: one that has ended has closed its connection."""
        return not any(connection.poll() for _, connection in self._processes)

    def run(
        self,
        worker: Callable[..., Any],
        args: tuple[object, ...],
        timeout_s: float,
        grace_s: float,
    ) -> "list[_Rank]":
        self.num_jobs += 1
        ranks = [_Rank(rank, *each) for rank, each in enumerate(self._processes)]
        run_dir = _run_dir(self._folder)
        try:
            for each in ranks:
                job = _Job(worker, each.rank, len(ranks), self._folder, run_dir, timeout_s)
                each.connection.send((job, args))
            _wait(ranks, timeout_s, grace_s)
        except BaseException:
            self.end()
            raise
        return ranks

    def end(self) -> None:
        _end(self._processes)
        shutil.rmtree(self._folder, ignore_errors=True)


_standing: dict[int, _Standing] = {}
"""Ranks that wait for a worker, by how many they are together."""


def end_standing() -> None:
    """End all ranks that stay up: their groups' threads wake a hundred times a second."""
    while _standing:
        _standing.popitem()[1].end()


# Before multiprocessing waits for them, at the end of this process.
util.Finalize(None, end_standing, exitpriority=10)


@dataclass(frozen=True)
class _Job:
    """What a rank runs, and with which others."""

    worker: Callable[..., Any]
    rank: int
    world_size: int
    folder: str
    run_dir: str
    timeout_s: float

    def run(self, args: tuple[object, ...], *, stays: bool) -> bytes:
        """Return what is reported: a word, and the result or the traceback."""
        try:
            with _group(self, stays=stays):
                result = self.worker(self.rank, self.world_size, *args)
            # Plain bytes: multiprocessing would share a tensor's memory with a process that ends.
            return pickle.dumps(("ok", result))
        except UnconnectedError:
            return pickle.dumps(("unconnected", traceback.format_exc()))
        except BaseException:  # noqa: BLE001 - whatever it is, the test shows it
            return pickle.dumps(("error", traceback.format_exc()))


def _run_dir(folder: str) -> str:
    """Where ranks record: the fork server keeps the environment that it was started with."""
    return os.environ.get("BOLTMESH_RUN_DIR") or str(Path(folder, "telemetry"))


def _start(main: Callable[..., None], world_size: int, *jobs: Any) -> _Started:
    """Start ``main(connection)``, or ``main(connection, job)`` with the job of each rank."""
    context = fork_server()
    started: _Started = []
    for rank in range(world_size):
        here, there = context.Pipe()
        job = (jobs[rank],) if jobs else ()
        process = context.Process(target=main, args=(there, *job), daemon=False)
        process.start()
        there.close()
        started.append((process, here))
    return started


def _end(processes: _Started) -> None:
    for process, connection in processes:
        if process.is_alive():
            process.kill()
        process.join()
        connection.close()


def _run_once(
    worker: Callable[..., Any],
    world_size: int,
    args: tuple[object, ...],
    timeout_s: float,
    grace_s: float,
) -> list[_Rank]:
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        jobs = [
            (_Job(worker, rank, world_size, folder, _run_dir(folder), timeout_s), args)
            for rank in range(world_size)
        ]
        processes = _start(_rank_main, world_size, *jobs)
        ranks = [_Rank(rank, *each) for rank, each in enumerate(processes)]
        try:
            _wait(ranks, timeout_s, grace_s)
        finally:
            _end(processes)
    return ranks


def fork_server() -> "multiprocessing.context.ForkServerContext":
    """Start the fork server, unless it runs, where it finds ``tests``, wherever a test stands.

    Python 3.11 has it take no notice of ``sys.path``: it looks in the folder that it starts in.
    That is the process's: a second thread of a test would take it for where the test stands.
    """
    context = multiprocessing.get_context("forkserver")
    with _STARTING:
        _start_fork_server()
    return context


@cache
def _start_fork_server() -> None:
    # Once: other threads of a test read the environment that this changes for a moment.
    forkserver.set_forkserver_preload(PRELOAD)
    before, environment = Path.cwd(), dict(os.environ)
    os.chdir(ROOT)
    if not Path("/proc/driver/nvidia").exists():
        # A CUDA build without NVML counts devices by CUDA, after which no fork may use it.
        os.environ.update(CUDA_VISIBLE_DEVICES="", PYTORCH_NVML_BASED_CUDA_CHECK="1")
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)


@cache
def await_fork_server() -> None:
    """Start the fork server, and return when it has imported what ranks begin with."""
    process = fork_server().Process(target=int)
    process.start()
    process.join()


def _wait(ranks: list[_Rank], timeout_s: float, grace_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while pending := {each.connection: each for each in ranks if not each.is_done}:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        for connection in ready:
            pending[connection].collect()  # type: ignore[index]
        if any(each.error for each in ranks):
            deadline = min(deadline, time.monotonic() + grace_s)
        if not ready and time.monotonic() >= deadline:
            reason = "did not finish" if not any(each.error for each in ranks) else "was waiting"
            for each in pending.values():
                each.is_done = True
                each.error = f"{reason} within {timeout_s:g} s and was ended"


def _raise_first_cause(ranks: list[_Rank]) -> None:
    failed = [each for each in ranks if each.error]
    if not failed:
        return

    def is_consequence(each: _Rank) -> bool:
        text = each.error or ""
        return "was waiting" in text or any(sign in text for sign in CONSEQUENCES)

    failed.sort(key=is_consequence)
    raise RankFailure("\n".join(f"rank {each.rank}: {each.error}" for each in failed))


def _rank_main(connection: Connection, job: tuple[_Job, tuple[object, ...]]) -> None:
    _stay_apart()
    connection.send_bytes(job[0].run(job[1], stays=False))
    connection.close()
    # gloo's threads sometimes abort while the interpreter goes down, see pytorch#190489.
    os._exit(0)


def _stand(connection: Connection) -> None:
    """Run one worker after the other, until the process that sends them has ended.

    Each begins with the environment and the random state that any rank begins with.
    """
    import numpy as np
    import torch

    _stay_apart()
    environment = dict(os.environ)
    random_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with suppress(EOFError):
        while True:
            job, args = connection.recv()
            os.environ.clear()
            os.environ.update(environment)
            random.setstate(random_state[0])
            np.random.set_state(random_state[1])
            torch.set_rng_state(random_state[2])
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            connection.send_bytes(job.run(args, stays=True))
    os._exit(0)


def _stay_apart() -> None:
    # A collection would visit all that the fork server imported; a visit writes, so that this
    # process had to copy nearly all of that memory: longer than most ranks of tests live.
    gc.freeze()


def connect(rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
    """Make the default group of a rank, of gloo, by a file that is not there yet.

    Raises:
        UnconnectedError: ``run_ranks`` starts the ranks again.
    """
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        raise UnconnectedError(str(error)) from error


@contextmanager
def _group(job: _Job, *, stays: bool) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    # Warnings are errors in the test process; in a rank, Lightning's advice on workers and
    # loggers is not what is tested.
    warnings.simplefilter("ignore")
    # But what a user of many ranks would be told by each of them is.
    warnings.filterwarnings("error", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    torch.set_num_threads(1)
    # Loader workers are started as in any training process on Linux; from a child of a fork
    # server they would each begin with a fork server, and its imports, of their own.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="tests",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        BOLTMESH_RUN_DIR=job.run_dir,
    )
    if not dist.is_initialized():
        timeout_s = max(job.timeout_s, LIMIT_S) if stays else job.timeout_s
        connect(job.rank, job.world_size, f"{job.folder}/rendezvous", timeout_s)
    try:
        yield
        dist.barrier()
    finally:
        gc.collect()
        if dist.is_initialized() and not stays:
            dist.destroy_process_group()
