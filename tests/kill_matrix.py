"""Kills a rank at each moment of a run, under each strategy.

::

    python -m tests.kill_matrix
    python -m tests.kill_matrix --strategy bolt_zero3

In each cell ``boltmesh fit`` trains a small model, and SIGKILL meets its last rank. The command has
to end by itself, with exit code 1, a line that names this rank, and no rank that still runs.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.forked_python import BOLTMESH, ForkedPython
from tests.support.killing import MOMENTS, KillAt

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests/support/tiny.yaml"
KILL_AT = f"{ROOT / 'tests/support/killing.py'}:{KillAt.__name__}"
STRATEGIES = {
    "bolt_ddp": (),
    "bolt_zero2": (),
    "bolt_zero3": (),
    "bolt_zero3_cpu": (),
    "bolt_pipeline": (),
    "bolt_tensor": (),
    "bolt_context": (f"model.class_path={ROOT / 'tests/support/tiny.py'}:TinySequence",),
    "bolt_expert": (f"model.class_path={ROOT / 'tests/support/tiny.py'}:TinyExperts",),
    "bolt_3d": ("strategy.pipeline=2", "strategy.tensor=1", "devices=4"),
}
"""By name the overrides that each needs."""
ENDS_S = 60.0
"""What a job may take to end, on a busy machine too."""
TIMEOUT_S = 300
"""How long ranks that are not ended wait for the one that was killed."""


def kill(folder: Path, strategy: str, moment: str) -> float:
    """Try one cell in an empty folder.

    Returns:
        Seconds from the kill to the end of the command.

    Raises:
        AssertionError: It did not end, or did not say which rank was killed.
    """
    environment = {
        **os.environ,
        "BOLTMESH_RUN_DIR": str(folder / "telemetry"),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *BOLTMESH, "fit", str(TINY), f"strategy={strategy}", *STRATEGIES[strategy],
        f"strategy.timeout_s={TIMEOUT_S}", "data.init_args.samples=24", "max_epochs=1",
        "trainer.limit_val_batches=1", "resume=auto",
    ]  # fmt: skip
    if moment == "load":
        first = ForkedPython(*command, cwd=folder, env=environment)
        _, error = first.communicate(timeout=TIMEOUT_S)
        assert first.returncode == 0, error
        command[-2:] = ["max_epochs=2", "resume=auto"]
    callback = f"trainer.callbacks=[{{class_path: '{KILL_AT}', init_args: {{moment: {moment}}}}}]"
    process = ForkedPython(*command, callback, cwd=folder, env=environment)
    try:
        killed = folder / "killed"
        until = time.monotonic() + TIMEOUT_S
        while not killed.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        process.wait(ENDS_S)
    finally:
        process.kill_all()
    _, error = process.communicate()
    assert killed.exists(), f"{moment} was not reached: {error[-2000:]}"
    took_s = time.time() - float(killed.read_text())
    pids = [int(path.read_text()) for path in sorted(folder.glob("pid-*"))]
    named = rf"rank {len(pids) - 1} \(pid {pids[-1]}\) was killed by signal 9 \(SIGKILL\)"
    assert process.returncode == 1, f"it ended with {process.returncode}: {error[-2000:]}"
    assert re.search(named, error), error[-2000:]
    left = [pid for pid in pids if _runs(pid)]
    assert not left, f"processes {left} still run"
    return took_s


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def main(strategies: Sequence[str]) -> int:
    """Try all cells of these strategies, and print which passed and how long they took."""
    passed: list[float] = []
    count = 0
    for strategy in strategies:
        for moment in MOMENTS:
            count += 1
            with tempfile.TemporaryDirectory(prefix="kill-") as folder:
                try:
                    passed.append(kill(Path(folder), strategy, moment))
                except Exception as error:  # noqa: BLE001 - the other cells are tried as well
                    print(f"{strategy:15} {moment:16} FAILED: {error}", flush=True)  # noqa: T201
                    continue
            print(f"{strategy:15} {moment:16} {passed[-1]:6.1f} s", flush=True)  # noqa: T201
    median = statistics.median(passed) if passed else float("nan")
    print(  # noqa: T201
        f"{len(passed)} of {count} jobs ended by themselves and named the killed rank, "
        f"in {median:.1f} s (median), {max(passed, default=median):.1f} s (longest)"
    )
    return int(len(passed) < count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A rank is killed at each moment of a run.")
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    sys.exit(main(parser.parse_args().strategy))
