"""Holds the pick of ``plan auto`` after ``tune`` against all layouts, measured on this machine.

    python -m tests.planner.measured [--models gpt llama] [--rounds 3] [--steps 10] [--json]

For each of the models of ``small_models``: ``boltmesh tune`` measures this machine and its best
three layouts, ``boltmesh plan auto`` picks one, and every layout that the plan names is run in
rounds that go back and forth, so that what else the machine does meets all of them. Later rounds
repeat the pick and the layouts that the first round leaves a chance to be the fastest. The loss is
how much longer a step of the pick takes than one of the fastest, by medians over all rounds. Exit
code 0 if it is at most 5 % for five of six models. The ranks run on the CPU, one thread each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Callback, Trainer

from boltmesh.strategies.registry import build_strategy
from tests.planner.small_models import KINDS, RANKS, SmallData, SmallModel
from tests.support.ranks import run_ranks

MODULE = Path(__file__).with_name("small_models.py")
ROWS = 64
"""Of a step, over all replicas."""
NEAR = 0.05
"""A pick within this of the fastest is a good one."""
GOOD = 10 / 12
"""Of the models, a good pick."""
ONE, TWO = "strategy.name=bolt_zero1", "strategy.name=bolt_zero2"
CHANCE = 1.5
"""A layout whose first round took this many times the fastest one's is not the fastest."""
WARMUP = 3
"""Steps of a run that do not count."""
TIMEOUT_S = 3600.0
"""Of a command: eight ranks on two cores take most of it to start."""


def write_config(name: str, folder: Path) -> Path:
    """Write the config of a model, of replicas, and return its path."""
    ranks = RANKS[name]
    config = {
        "model": {"class_path": f"{MODULE}:SmallModel", "init_args": {"name": name}},
        "data": {
            "class_path": f"{MODULE}:SmallData",
            "init_args": {"name": name, "batch_size": ROWS // ranks, "batches": 64},
        },
        "strategy": {"name": "bolt_ddp"},
        "trainer": {"accelerator": "cpu", "devices": ranks, "max_epochs": 1},
        "run": {"name": name, "seed": 1},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def measure(name: str, folder: Path, *, rounds: int, steps: int) -> dict[str, Any]:
    """Tune, plan, and measure all layouts of a model."""
    config = str(write_config(name, folder))
    start = time.monotonic()
    tuned = _json(folder, "tune", config, "--steps", str(steps), "--rounds", str(rounds))
    planned = _json(folder, "plan", "auto", config, "--top", "20")
    layouts = [each["overrides"] for each in planned["best"]]
    # Stages 1 and 2 are one kind of layout to the plan, which names the faster one.
    zero = next(each for each in layouts if each[0] in {ONE, TWO})
    layouts.append([TWO if zero[0] == ONE else ONE, *zero[1:]])
    took = _measured(name, layouts, rounds=rounds, steps=steps)
    pick, best = " ".join(layouts[0]), min(took, key=lambda each: took[each])
    return {
        "model": name,
        "ranks": RANKS[name],
        "pick": pick,
        "fastest": best,
        "loss": took[pick] / took[best] - 1,
        "predicted_s": {" ".join(each["overrides"]): each["step_s"] for each in planned["best"]},
        "tuned_s": {each["command"]: each["measured_s"] for each in tuned["layouts"]},
        "measured_s": took,
        "seconds": time.monotonic() - start,
    }


def _timed(
    rank: int, world_size: int, name: str, layouts: Sequence[Sequence[str]], steps: int
) -> list[list[float]]:
    """Train some steps by the overrides of each layout; return the seconds of those that count."""
    return [_timed_layout(world_size, name, overrides, steps) for overrides in layouts]


def _timed_layout(world_size: int, name: str, overrides: Sequence[str], steps: int) -> list[float]:
    given = {
        key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in overrides)
    }
    arguments = {
        key.removeprefix("strategy."): value
        for key, value in given.items()
        if key.startswith("strategy.")
    }
    clock = Clock()
    trainer = Trainer(
        strategy=build_strategy(arguments.pop("name"), telemetry=False, **arguments),
        devices=world_size,
        accelerator="cpu",
        max_steps=WARMUP + steps,
        accumulate_grad_batches=given.get("trainer.accumulate_grad_batches", 1),
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = given.get("data.init_args.batch_size", ROWS // RANKS[name])
    trainer.fit(SmallModel(name), SmallData(name, batch_size=rows, batches=64))
    return [later - sooner for sooner, later in pairwise(clock.ends[WARMUP - 1 :])]


class Clock(Callback):
    """Notes when each optimizer step has ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.ends):
            self.ends.append(time.perf_counter())


def _measured(
    name: str, layouts: Sequence[Sequence[str]], *, rounds: int, steps: int
) -> dict[str, float]:
    """Return the median step of each layout, the pick first, over rounds back and forth."""
    took: dict[str, list[float]] = {" ".join(each): [] for each in layouts}
    left = list(layouts)
    for _ in range(rounds):
        of_ranks = run_ranks(_timed, RANKS[name], name, left, steps, timeout_s=TIMEOUT_S)
        for overrides, seconds in zip(left, of_ranks[0], strict=True):
            took[" ".join(overrides)] += seconds
        medians = {label: statistics.median(each) for label, each in took.items()}
        limit = CHANCE * min(medians.values())
        left = [
            each
            for each in reversed(left)
            if each is layouts[0] or medians[" ".join(each)] <= limit
        ]
    return medians


def _json(folder: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_run(folder, *arguments, "--json").strip().splitlines()[-1])
    return found


def _run(folder: Path, *arguments: str) -> str:
    # Programs of their own: a fork has the threads of a parent that has computed, as a count.
    command = [sys.executable, "-m", "boltmesh", *arguments]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=env, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"boltmesh {' '.join(arguments[:3])}: {done.stderr.strip()}")
    return done.stdout


def lines(found: dict[str, Any]) -> list[str]:
    """Return what is printed of a model."""
    loss = f"{100 * found['loss']:.1f} %"
    head = f"{found['model']}, {found['ranks']} ranks: the pick takes {loss} longer"
    rows = [f"{head} than the fastest ({found['seconds']:.0f} s)"]
    for variant, seconds in sorted(found["measured_s"].items(), key=lambda each: each[1]):
        predicted = found["predicted_s"].get(variant)
        said = "          " if predicted is None else f"{1e3 * predicted:7.1f} ms"
        mark = "*" if variant == found["pick"] else " "
        rows.append(f"  {mark} {1e3 * seconds:7.1f} ms, planned {said}  {variant}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    results = []
    for name in given.models:
        with tempfile.TemporaryDirectory(prefix="boltmesh-measured-") as folder:
            found = measure(name, Path(folder), rounds=given.rounds, steps=given.steps)
        results.append(found)
        print("\n".join(lines(found)), file=sys.stderr if given.json else sys.stdout, flush=True)
    good = sum(each["loss"] <= NEAR for each in results)
    if given.json:
        print(json.dumps({"models": results, "within_5_percent": good}))
    else:
        print(f"{good} of {len(results)} picks are within {100 * NEAR:.0f} % of the fastest layout")
    return 0 if good >= GOOD * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
