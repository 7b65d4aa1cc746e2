"""The optimizer step with offload, beside DeepSpeed's and beside what the machine could do.

    python tests/benchmarks/deepspeed_step.py --place nvme [--folder DISK] [--settings NAME ...]
    python tests/benchmarks/deepspeed_step.py --place cpu
    python tests/benchmarks/deepspeed_step.py --place nvme --width 512 --depth 4 --rounds 2  # smoke

Needs ``pip install deepspeed`` and a compiler, see ``peers/deepspeed_engine.py``; without it, ours
is measured against the limit of the machine alone. ``--list`` tells the settings of DeepSpeed.

Everybody trains the same model from the same weights on the same batches with AdamW, clips at 1.0,
and has its own process; they take turns, in an order that changes from round to round. A turn
begins and ends with nothing under way. Ours runs under Lightning's Trainer. The losses and norms of
each have to be those of one process without offload (``peers/reference.py``).

Four times of a step are printed, and the median over rounds of their ratio to ours:
  step      everything: forward, backward, optimizer
  optimizer the step less forward and backward of the bare network in the same round: what offload
            adds, wherever it hides (DeepSpeed writes gradients to disk in backward, for instance)
  tail      from the end of backward until the next step may begin: DeepSpeed's ``engine.step()``
  cpu       of all threads, which a busy machine does not change
The limit is, in each round, the longer of two: AdamW over as many parameters in memory, and as many
bytes read and written at once by plain threads with direct I/O.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.benchmarks.peers import boltmesh_engine, deepspeed_engine, limits, reference
from tests.benchmarks.peers.problem import Problem
from tests.benchmarks.peers.turns import Contestant, Report

OURS = "boltmesh"
BARE, ADAM, DISK = "the network alone", "AdamW in memory", "reads and writes"
CHOSEN = {"nvme": ["by block", "gradients in memory"], "cpu": ["default", "by block"]}
"""The fastest of each kind, where they were tried: with a part of the state in memory, and all."""
WARMUP = {OURS: 12}
"""Steps before the first round, where they are more than two: ours does not overlap steps with
backward in its first ten."""
TOLERANCE = {True: 5e-3, False: 1e-4}
"""Relative error of losses and norms, for bf16 and fp32. In bf16 a last digit that was rounded the
other way moves later losses by up to 2e-3; what is really wrong shows more (see the README)."""


def main() -> None:
    options = parse_options()
    if options.list:
        for name, setting in deepspeed_engine.SETTINGS[options.place].items():
            print(f"{name}: {setting.why}")
        return
    settings = options.settings or CHOSEN[options.place]
    if not deepspeed_engine.is_installed():
        print("DeepSpeed is not here (pip install deepspeed): only ours and the limit.")
        settings = []
    with tempfile.TemporaryDirectory(prefix="deepspeed-step-", dir=options.folder) as folder:
        problem = Problem(
            width=options.width,
            depth=options.depth,
            place=options.place,
            folder=Path(folder),
            is_bf16=options.precision == "bf16",
            loss_scale=100.0 if options.clipped else 0.01,
        )
        contestants = start(problem, settings, options.huge_pages, options.threads)
        try:
            reports = measure(contestants, options.rounds, options.steps)
        finally:
            for each in contestants.values():
                each.close()
        check(problem, contestants, options.threads)
    show(problem, reports, options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", choices=("nvme", "cpu"), default="nvme")
    parser.add_argument("--folder", help="on the disk to measure; default: temporary files")
    parser.add_argument("--width", type=int, default=2048, help="8 x width^2 parameters a block")
    parser.add_argument("--depth", type=int, default=6, help="blocks")
    parser.add_argument("--precision", choices=("bf16", "32"), default="bf16")
    parser.add_argument("--clipped", action="store_true", help="norms above the 1.0 to clip at")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--settings", nargs="*", metavar="NAME", help="of DeepSpeed, see --list")
    parser.add_argument("--huge-pages", action="store_true", help="2 MiB pages for DeepSpeed")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    known = deepspeed_engine.SETTINGS[options.place]
    if unknown := set(options.settings or ()) - set(known):
        parser.error(f"--settings {sorted(unknown)} is none of {sorted(known)}")
    return options


def start(
    problem: Problem, settings: Sequence[str], has_huge_pages: bool, threads: int
) -> dict[str, Contestant]:
    """Start one after the other: each builds the whole model in memory first."""
    contestants: dict[str, Contestant] = {}

    def add(
        name: str,
        train: Callable[..., None],
        *args: object,
        environment: dict[str, str] | None = None,
    ) -> None:
        own = replace(problem, folder=problem.folder / str(len(contestants)))
        own.folder.mkdir()
        each = Contestant(train, (*args, own), threads=threads, environment=environment)
        contestants[name] = each
        each.run(max(2, WARMUP.get(name, 0)))

    add(OURS, boltmesh_engine.train)
    add(BARE, limits.forward_and_backward)
    add(ADAM, limits.adam)
    if problem.place == "nvme":
        add(DISK, limits.disk)
    known = deepspeed_engine.SETTINGS[problem.place or ""]
    for name in settings:
        setting = known[name]
        environment = deepspeed_engine.HUGE_PAGES if has_huge_pages else None
        add(f"DeepSpeed, {name}", deepspeed_engine.train, setting, environment=environment)
    return contestants


def measure(contestants: dict[str, Contestant], rounds: int, steps: int) -> dict[str, list[Report]]:
    reports: dict[str, list[Report]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        turn = number % len(names)  # nobody always comes first
        for name in names[turn:] + names[:turn]:
            reports[name].append(contestants[name].run(steps))
    return reports


class Times(NamedTuple):
    """One round of one engine, in seconds; see the top of this file."""

    step: float
    optimizer: float
    tail: float
    cpu: float


def show(problem: Problem, reports: dict[str, list[Report]], options: argparse.Namespace) -> None:
    rounds = range(options.rounds)
    bare = [each.step_s for each in reports[BARE]]
    limit = [
        max(reports[name][number].step_s for name in (ADAM, DISK) if name in reports)
        for number in rounds
    ]
    engines = {
        name: [
            Times(each.step_s, each.step_s - bare[number], each.after_backward_s, each.cpu_s)
            for number, each in enumerate(turns)
        ]
        for name, turns in reports.items()
        if name not in {BARE, ADAM, DISK}
    }
    numel = problem.num_parameters
    print(
        f"{numel / 1e6:.0f} million parameters, {problem.place}, {options.precision}, norm "
        f"{reports[OURS][-1].norms[-1]:.3g} clipped at {problem.max_norm:g}, {options.threads} "
        f"threads, {options.rounds} rounds of {options.steps} steps, torch {torch.__version__}"
        + (", 2 MiB pages for DeepSpeed" if options.huge_pages else "")
    )
    for name, turns in reports.items():
        if name not in engines:
            wall, cpu = (
                statistics.median(getattr(each, kind) for each in turns)
                for kind in ("step_s", "cpu_s")
            )
            print(f"  {name:<38}{wall:8.3f} s, cpu {cpu:.3f} s")
    kinds = "".join(f"{kind + ', s':>14}{'ratio':>7}" for kind in Times._fields)
    print(f"  {'':38}{kinds}{'of the limit':>14}{'peak, B/parameter':>19}")
    for name, times in engines.items():
        line = f"  {name:<38}"
        for mine, theirs in zip(
            zip(*times, strict=True), zip(*engines[OURS], strict=True), strict=True
        ):
            ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
            line += f"{statistics.median(mine):14.3f}{ratio:7.2f}"
        part = statistics.median(a / b.optimizer for a, b in zip(limit, times, strict=True))
        peak = max(each.peak_bytes for each in reports[name]) / numel
        print(f"{line}{part:14.2f}{peak:19.1f}")


def check(problem: Problem, contestants: dict[str, Contestant], threads: int) -> None:
    """End with an error when an engine did not compute what it should: its times mean nothing."""
    for is_cast, names in (
        (False, [OURS]),
        (True, [each for each in contestants if each not in {OURS, BARE, ADAM, DISK}]),
    ):
        engines = {name: contestants[name] for name in names}
        if not engines:
            continue
        truth = Contestant(reference.train, (is_cast, problem), threads=threads)
        try:
            truth.run(max(len(each.losses) for each in engines.values()))
        finally:
            truth.close()
        for name, engine in engines.items():
            for what, theirs, right in (
                ("loss", engine.losses, truth.losses),
                ("norm", engine.norms, truth.norms),
            ):
                compare(problem, f"{name}: {what}", theirs, right)


def compare(problem: Problem, what: str, theirs: Sequence[float], right: Sequence[float]) -> None:
    errors = [abs(a / b - 1) for a, b in zip(theirs, right, strict=False)]
    print(
        f"  {what} of {len(errors)} steps at most {max(errors):.1e} off, in the first four "
        f"{max(errors[:4]):.1e}"
    )
    for number, error in enumerate(errors):
        if not error <= TOLERANCE[problem.is_bf16]:
            sys.exit(
                f"{what} was {theirs[number]:.6g} in step {number}, {right[number]:.6g} in one "
                f"process: it does not train the same."
            )


if __name__ == "__main__":
    main()
