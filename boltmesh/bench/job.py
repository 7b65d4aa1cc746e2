"""Runs one strategy as a job of its own and watches it."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from boltmesh.bench.measurement import BenchRun, JobWatch, measure
from boltmesh.bench.variant import Variant
from boltmesh.telemetry.job import ID_VARIABLE, NAME_VARIABLE, SWITCH_VARIABLE, new_job_id

LOOK_S = 0.5
_PREFIX = "boltmesh: "
_STOP_S = 30.0
"""How long a job may take to stop when this command is stopped."""
LIBRARIES_BYTES = 2**29
"""For torch and Lightning in a process before there is a model; measured: 0.33 GiB."""
OUT_OF_MEMORY = "out of memory"
"""Reason of a job that had too little."""
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can.t allocate memory|cannot allocate memory|MemoryError|bad_alloc",
    re.IGNORECASE,
)

SHORT_RUN = (
    "trainer.max_epochs=null",
    "trainer.max_time=null",
    "trainer.limit_val_batches=0",
    "trainer.num_sanity_val_steps=0",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.logger=[]",
    "run.checkpoint.enabled=false",
    "run.resume=null",
)
"""Settings of every job: training steps alone."""


@dataclass(frozen=True)
class Ended:
    """How a job ended: with figures, or with a reason."""

    run: BenchRun | None
    reason: str | None = None
    is_refused: bool = False
    """Whether the layout was refused (exit code 2); else the run failed."""


def run_variant(
    variant: Variant,
    config: str,
    overrides: Sequence[str],
    *,
    steps: int,
    warmup: int,
    host_bytes: int | None = None,
) -> Ended:
    """Train for ``warmup + steps`` optimizer steps and measure the latter.

    Args:
        variant: The strategy to run.
        config: The user's config.
        overrides: ``key=value``, those of the variant included.
        steps: Optimizer steps that count.
        warmup: Optimizer steps before them.
        host_bytes: Host memory that each rank may allocate beside its libraries. None: any.
    """
    watch = JobWatch(job_id := new_job_id())
    with tempfile.TemporaryDirectory(prefix="boltmesh-bench-") as folder:
        line = [*overrides, *SHORT_RUN, f"trainer.max_steps={warmup + steps}", f"run.dir={folder}"]
        environment = {
            **os.environ,
            **variant.environment,
            ID_VARIABLE: job_id,
            NAME_VARIABLE: f"bench {variant.label}",
        }
        environment.pop(SWITCH_VARIABLE, None)
        errors = Path(folder, "stderr")
        with errors.open("wb") as stderr, watch.opened():
            arguments = ["fit", config, *line]
            code = _watched(arguments, environment, stderr.fileno(), watch, host_bytes)
        said = errors.read_text(encoding="utf-8", errors="replace")
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code != 0:
        reason = _reason(said, code, is_limited=host_bytes is not None)
        return Ended(None, reason, is_refused=code == 2)
    found = measure(watch, warmup=warmup)
    if found is None:
        return Ended(None, f"it ended before step {warmup + 1}, and nothing was measured")
    if found.last_step < warmup + steps:
        reason = f"it ended after step {found.last_step} of {warmup + steps}"
        return Ended(found, reason)
    return Ended(found)


def _watched(
    arguments: Sequence[str],
    environment: dict[str, str],
    stderr: int,
    watch: JobWatch,
    host_bytes: int | None,
) -> int:
    process = subprocess.Popen(  # noqa: S603 - this very program
        [sys.executable, "-m", "boltmesh", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
    )
    if host_bytes is not None:  # the ranks are its children, and each has the limit for itself
        most = host_bytes + LIBRARIES_BYTES
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (most, most))
    try:
        while process.poll() is None:
            watch.look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=LOOK_S)
        watch.look()
    except BaseException:
        process.terminate()
        try:
            process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    return process.returncode


def _reason(said: str, code: int, *, is_limited: bool) -> str:
    # Under a limit a thread has no room for its stack.
    if _OUT_OF_MEMORY.search(said) or (is_limited and "Resource temporarily unavailable" in said):
        return OUT_OF_MEMORY
    lines = [each for each in said.splitlines() if each.startswith(_PREFIX)]
    if lines:
        return lines[-1].removeprefix(_PREFIX)
    other = said.strip().splitlines()
    return other[-1] if other else f"it ended with exit code {code} and said nothing"
