"""Holds the pick of ``plan auto`` after ``tune`` against all layouts, measured on this machine.

    python -m tests.planner.measured [--models gpt llama] [--rounds 3] [--steps 10] [--json]

For each of the models of ``small_models``: ``boltmesh tune`` measures this machine and its best
three layouts, ``boltmesh plan auto`` picks one, and ``boltmesh bench`` runs every layout that the
plan knows, in rounds that go back and forth, so that what else the machine does meets all of them.
The loss is how much longer a step of the pick takes than one of the fastest, by medians over all
rounds. Exit code 0 if it is at most 5 % for five of six models. All twelve take about twenty
minutes on two idle cores; the ranks run on the CPU, one thread each.
"""

import argparse
import csv
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.planner.small_models import KINDS, RANKS
from tests.support.forked_python import BOLTMESH, run_python

MODULE = Path(__file__).with_name("small_models.py")
ROWS = 64
"""Of a step, over all replicas."""
NEAR = 0.05
"""A pick within this of the fastest is a good one."""
GOOD = 10 / 12
"""Of the models, a good pick."""
TIMEOUT_S = 580.0


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
    tuned = _json(folder, "tune", config, "--steps", str(steps))
    planned = _json(folder, "plan", "auto", config, "--top", "20")
    variants = [_variant(each["overrides"]) for each in planned["best"]]
    pick = variants[0]
    # Stages 1 and 2 are one kind of layout to the plan, which names the faster one.
    others = [each.replace("zero2", "zero1") for each in variants if "zero2" in each]
    others += [each.replace("zero1", "zero2") for each in variants if "zero1" in each]
    variants += [each for each in others if each not in variants]
    took = _bench(folder, config, variants, rounds=rounds, steps=steps)
    best = min(took, key=lambda each: took[each])
    return {
        "model": name,
        "ranks": RANKS[name],
        "pick": pick,
        "fastest": best,
        "loss": took[pick] / took[best] - 1 if pick in took else None,
        "predicted_s": {
            variant: each["step_s"]
            for variant, each in zip(variants, planned["best"], strict=False)
        },
        "tuned_s": {each["command"]: each["measured_s"] for each in tuned["layouts"]},
        "measured_s": took,
        "seconds": time.monotonic() - start,
    }


def _variant(overrides: Sequence[str]) -> str:
    """Return the overrides of a layout as ``boltmesh bench --strategies`` takes them."""
    (name,) = (each for each in overrides if each.startswith("strategy.name="))
    rest = [each.removeprefix("strategy.") for each in overrides if each != name]
    return "+".join([name.removeprefix("strategy.name="), *rest])


def _bench(
    folder: Path, config: str, variants: Sequence[str], *, rounds: int, steps: int
) -> dict[str, float]:
    """Return the median step of each layout that has run, in seconds."""
    table = folder / "table"
    counts = ["--rounds", str(rounds), "--steps", str(steps), "--warmup", "3"]
    given = ["--strategies", ",".join(variants), "--output", str(table), *counts]
    _run(folder, "bench", config, *given)
    with table.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    column = next(each for each in rows[0] if each.startswith("step"))
    return {row["strategy"]: float(row[column]) / 1e3 for row in rows if row[column]}


def _json(folder: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_run(folder, *arguments, "--json").strip().splitlines()[-1])
    return found


def _run(folder: Path, *arguments: str) -> str:
    env = {**os.environ, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = run_python(*BOLTMESH, *arguments, cwd=folder, env=env, timeout_s=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"boltmesh {' '.join(arguments[:3])}: {done.stderr.strip()}")
    return done.stdout


def lines(found: dict[str, Any]) -> list[str]:
    """Return what is printed of a model."""
    loss = "-" if found["loss"] is None else f"{100 * found['loss']:.1f} %"
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
    good = sum(each["loss"] is not None and each["loss"] <= NEAR for each in results)
    if given.json:
        print(json.dumps({"models": results, "within_5_percent": good}))
    else:
        print(f"{good} of {len(results)} picks are within {100 * NEAR:.0f} % of the fastest layout")
    return 0 if good >= GOOD * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
