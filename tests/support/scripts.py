"""Starts a script of a user's, which starts the second rank itself."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.forked_python import ForkedPython

ROOT = Path(__file__).parents[2]


@contextmanager
def script_of_two_ranks(text: str, folder: Path) -> Iterator[tuple[ForkedPython, dict[int, int]]]:
    """Start a script and wait until both ranks have written ``READY <rank> <pid>``.

    Gives the script's process and the process of each rank; none outlives the test. What they
    write to stderr is in ``folder/stderr``.
    """
    script = folder / "train.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{text}")
    reading, writing = os.pipe()
    with (folder / "stderr").open("w") as stderr, os.fdopen(writing, "w") as stdout:
        process = ForkedPython(
            str(script),
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    pids: dict[int, int] = {}
    output = os.fdopen(reading)
    try:
        for line in output:
            if line.startswith("READY"):
                _, rank, pid = line.split()
                pids[int(rank)] = int(pid)
            if len(pids) == 2:
                break
        yield process, pids
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.close()


def wait_until_gone(pid: int, seconds: float) -> bool:
    """Whether a process has ended before so many seconds have passed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            process = psutil.Process(pid)
            # Its files are open until its last thread has ended.
            if process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
