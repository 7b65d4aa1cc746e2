"""A real run of two ranks that trains for as long as a test lasts."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.snapshot import JobSnapshot
from tests.support.forked_python import ForkedPython

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
BOLTMESH = [sys.executable, "-m", "boltmesh"]


def wait_for(condition: Callable[[], bool], what: str, *, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.1)


def snapshot() -> JobSnapshot | None:
    with contextlib.suppress(TelemetryError), open_job() as job:
        return job.snapshot()
    return None


def global_step() -> int:
    found = snapshot()
    return 0 if found is None else found.global_step


@contextlib.contextmanager
def run_training(folder: Path, *, step_s: float = 0.05) -> Iterator[ForkedPython]:
    """Train until the block ends; it begins once a few steps are done."""
    command = [
        "-m", "boltmesh", "fit", str(TINY), "max_epochs=100000", f"model.init_args.step_s={step_s}"
    ]  # fmt: skip
    with (folder / "fit.log").open("wb") as log:
        process = ForkedPython(*command, cwd=folder, stdout=log, stderr=log)
        try:
            wait_for(
                lambda: global_step() >= 8 or process.poll() is not None,
                f"steps; see {folder}/fit.log",
            )
            assert process.poll() is None, (folder / "fit.log").read_text()
            yield process
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Let as many processes compute as there are cores, for ten minutes at most.

    Tests that run beside these have the larger part of the time.
    """
    code = (
        "import os, time; os.nice(5); end = time.monotonic() + 600\n"
        "while time.monotonic() < end: pass"
    )
    with contextlib.ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", code]))
            stack.callback(process.kill)
        yield
