"""Fits whose modules write to gathered parameters, under glibc's heap checks.

::

    python -m tests.heap_check --fits 2000

``MALLOC_CHECK_=3`` ends a process at the first heap block whose neighbour wrote over its edge, and
``MALLOC_PERTURB_`` fills memory when it is allocated and when it is freed, with another byte in
each process. What every fit leaves has to be the same to the bit under each of these bytes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.parity.test_zero_writes import KINDS, STRATEGIES, Clamped, Run, fit
from tests.support.ranks import run_ranks
from tests.support.turns import in_turn

ROOT = Path(__file__).parents[1]
BYTES = (165, 90, 255, 1, 127)
CHECKS = "libc_malloc_debug.so.0"
"""Since glibc 2.34 ``MALLOC_CHECK_`` has no effect without it."""
VARIANTS: list[dict[str, Any]] = [{}, {"accumulate_grad_batches": 2}, {"resumes": True}]
UNSUPPORTED = {"zero2_cpu", "zero3_nvme"}
"""Not tested with accumulation."""


def check_heap(fits: int, *, rounds: int = 4) -> int:
    """Run at least so many fits on two ranks each, and return how many there were.

    Args:
        fits: At least so many.
        rounds: How often the ranks are started with the same byte.

    Raises:
        AssertionError: One failed, or differs from the first of its kind.
    """
    count, fits_of_a_part = 0, rounds * len(_calls(""))
    with tempfile.TemporaryDirectory(prefix="heap-") as folder:
        first = Path(folder, "first.pt")
        while count < fits:
            byte = BYTES[count // fits_of_a_part % len(BYTES)]
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "LD_PRELOAD": CHECKS,
                "MALLOC_CHECK_": "3",
                "MALLOC_PERTURB_": str(byte),
            }
            line = [
                sys.executable,
                "-m",
                "tests.heap_check",
                "--part",
                folder,
                str(first),
                str(rounds),
            ]
            done = subprocess.run(line, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"byte {byte}: {done.stderr[-6000:]}"
            count += fits_of_a_part
            print(f"{count} fits, byte {byte}: equal", flush=True)  # noqa: T201
    return count


def _calls(folder: str) -> list[tuple[Any, ...]]:
    return [
        (kind, name, folder, variant)
        for kind in KINDS
        for name in STRATEGIES
        for variant in VARIANTS
        if not (variant.get("resumes") and name in ("zero1", "zero2"))
        if not ("accumulate_grad_batches" in variant and (name in UNSUPPORTED or kind is Clamped))
    ]


def _run_part(folder: str, first: Path, rounds: int) -> None:
    for _ in range(rounds):
        _run_round(folder, first)


def _run_round(folder: str, first: Path) -> None:
    results: list[list[Run]] = run_ranks(in_turn, 2, fit, _calls(folder), timeout_s=1800.0)
    found = [[(run.losses, run.parameters) for run in rank] for rank in results]
    if not first.exists():
        torch.save(found, first)
    for rank, runs in enumerate(torch.load(first, weights_only=True)):
        for call, (losses, parameters), now in zip(
            _calls(folder), runs, results[rank], strict=True
        ):
            assert losses == now.losses, call
            assert all(torch.equal(now.parameters[name], parameters[name]) for name in parameters)


def main() -> None:
    """Run the fits."""
    parser = argparse.ArgumentParser(description="Fits under glibc's heap checks.")
    parser.add_argument("--fits", type=int, default=2000)
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        _run_part(given.part[0], Path(given.part[1]), int(given.part[2]))
        return
    print(f"{check_heap(given.fits)} fits: no damage, equal to the bit")  # noqa: T201


if __name__ == "__main__":
    main()
