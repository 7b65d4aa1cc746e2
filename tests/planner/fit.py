"""Fits the rates of the step-time model to published runs.

    python -m tests.planner.fit [--leave-out]

Writes boltmesh/planner/rates.yaml from all sources; with ``--leave-out`` also left_out.yaml here,
which has for each source the rates from all other sources, for ``validate``. Takes minutes.

The loss is the mean absolute logarithm of predicted over measured time, each source with the weight
of the square root of its number of runs. Source of the method: pattern search, Hooke and Jeeves
1961, https://doi.org/10.1145/321062.321069
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from boltmesh.planner.rates import DATA, Rates
from boltmesh.planner.step_time import StepTimeModel
from tests.planner.rows import Run, read_runs, timed

LEFT_OUT = Path(__file__).with_name("left_out.yaml")

BOUNDS = {
    "matmul": (0.85, 1.0),
    "elementwise": (1.0, 2.0),
    "network": (0.5, 0.95),
    "onload_network": (0.15, 0.95),
    "step_ms": (1.0, 100.0),
    "straggler": (0.0005, 0.05),
}
"""What is fitted, and what is physically possible; a rate at its bound is not identified."""
START = Rates(
    matmul=0.9,
    elementwise=1.0,
    network=0.8,
    onload_network=0.5,
    step_ms=20.0,
    straggler=0.005,
)
"""Where each search begins, so that no run that is left out has a part in its rates."""
MOST_RUNS = 40
"""So many runs of a source are used, evenly over the file."""


def predict(run: Run, rates: Rates) -> float:
    """Return the predicted seconds of a step."""
    return StepTimeModel(run.model, run.cluster, rates).predict(run.layout).seconds


def loss(runs: Sequence[Run], rates: Rates) -> float:
    """Return the weighted mean of |log(predicted / measured)|."""
    counts = Counter(run.source for run in runs)
    total = weights = 0.0
    for run in runs:
        weight = counts[run.source] ** -0.5
        assert run.seconds is not None
        error = abs(math.log(predict(run, rates) / run.seconds))
        total += weight * min(error, 0.7)
        weights += weight
    return total / weights


def fit(runs: Sequence[Run], start: Rates, *, rounds: int = 12) -> Rates:
    """Search the rates one after the other, with steps that shrink."""
    best, lowest = start, loss(runs, start)
    step = 0.2
    for _ in range(rounds):
        improved = False
        for name, (low, high) in BOUNDS.items():
            for factor in (math.exp(step), math.exp(-step)):
                value = min(high, max(low, getattr(best, name) * factor))
                tried = replace(best, **{name: value})
                found = loss(runs, tried)
                if found < lowest - 1e-6:
                    best, lowest, improved = tried, found, True
                    break
        if not improved:
            step /= 2
        if step < 0.02:
            break
    return best


def written(rates: Rates) -> dict[str, float]:
    """Return the rates as a file has them."""
    return {name: float(f"{value:.4g}") for name, value in asdict(rates).items() if name in BOUNDS}


def _without(source: str) -> dict[str, float]:
    others = [run for run in timed(read_runs()[0]) if run.source != source]
    return written(fit(thinned(others), START))


def thinned(runs: Sequence[Run]) -> list[Run]:
    """Return at most ``MOST_RUNS`` of each source."""
    found = []
    for source in sorted({run.source for run in runs}):
        members = [run for run in runs if run.source == source]
        found += members[:: math.ceil(len(members) / MOST_RUNS)]
    return found


def main() -> None:
    runs = thinned(list(timed(read_runs()[0])))
    rates = fit(runs, START)
    print(f"all sources: {loss(runs, rates):.3f}", written(rates))
    head = "# Written by `python -m tests.planner.fit`; see Rates for what each is.\n"
    DATA.write_text(head + yaml.safe_dump(written(rates), sort_keys=False), encoding="utf-8")
    if "--leave-out" not in sys.argv:
        return
    sources = sorted({run.source for run in runs})
    with ProcessPoolExecutor(2) as pool:
        found = dict(zip(sources, pool.map(_without, sources), strict=True))
    head = (
        "# Written by `python -m tests.planner.fit --leave-out`: rates that never saw the source.\n"
    )
    LEFT_OUT.write_text(head + yaml.safe_dump(found, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main()
