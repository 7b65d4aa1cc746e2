"""Fits the rates of the step-time model to published runs.

    python -m tests.planner.fit [--leave-out]

Writes rates.yaml and spread.yaml of boltmesh/planner from all sources; with ``--leave-out``
also left_out.yaml here, which has for each source the rates and the spread from all others, for
``validate``. Takes minutes; ``--spread`` keeps the rates.

The loss of rates is the mean absolute logarithm of predicted over measured time, each source with
the weight of the square root of its number of runs; that of the spread is minus the logarithm of
the likelihood of these errors, with the same weights. Source of the method: pattern search, Hooke
and Jeeves 1961, https://doi.org/10.1145/321062.321069
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml  # type: ignore[import-untyped]

from boltmesh.planner.calibration import DATA as SPREAD_DATA
from boltmesh.planner.calibration import PredictedLayout, Spread, covariance
from boltmesh.planner.rates import DATA, Rates
from boltmesh.planner.step_time import StepTimeModel
from tests.planner.calibration import described
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
SPREAD_BOUNDS = {
    "stack": (0.01, 0.5),
    "part": (0.01, 1.0),
    "narrow": (0.01, 0.5),
    "layout": (0.01, 0.5),
    "noise": (0.02, 0.2),
    "octaves": (1.0, 16.0),
}
SPREAD = Spread(stack=0.1, part=0.3, narrow=0.1, layout=0.1, noise=0.05, octaves=6.0)
MOST_ERROR = 0.3
"""Larger ones count as this, so that a run that went wrong does not decide."""
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


def fit(runs: Sequence[Run], start: Rates) -> Rates:
    """Return the rates of the least loss."""
    return search(start, BOUNDS, lambda tried: loss(runs, tried))


T = TypeVar("T", Rates, Spread)
Bounds = Mapping[str, tuple[float, float]]


def search(start: T, bounds: Bounds, loss_of: Callable[[T], float], *, rounds: int = 12) -> T:
    """Change one number after the other, with steps that shrink."""
    best, lowest = start, loss_of(start)
    step = 0.2
    for _ in range(rounds):
        improved = False
        for name, (low, high) in bounds.items():
            for factor in (math.exp(step), math.exp(-step)):
                value = min(high, max(low, getattr(best, name) * factor))
                tried = replace(best, **{name: value})
                found = loss_of(tried)
                if found < lowest - 1e-6:
                    best, lowest, improved = tried, found, True
                    break
        if not improved:
            step /= 2
        if step < 0.02:
            break
    return best


@dataclass(frozen=True)
class Errors:
    """The errors of a source's runs, and what they depend on."""

    layouts: Sequence[PredictedLayout]
    values: Sequence[float]
    """Logarithms of measured over predicted times."""


def described_by(run: Run, rates: Rates) -> tuple[PredictedLayout, float]:
    """Return what the error of a run's prediction depends on, and the predicted seconds."""
    time = StepTimeModel(run.model, run.cluster, rates).predict(run.layout)
    return described(run, time), time.seconds


def errors_of(runs: Sequence[Run], rates: Mapping[str, Rates]) -> list[Errors]:
    """Return the errors of each source, as predicted by rates that never saw it."""
    found = []
    for source in sorted({run.source for run in runs}):
        members = [run for run in runs if run.source == source]
        made = [described_by(run, rates[source]) for run in members]
        values = [
            max(-MOST_ERROR, min(MOST_ERROR, math.log((run.seconds or 0.0) / seconds)))
            for run, (_, seconds) in zip(members, made, strict=True)
        ]
        found.append(Errors([layout for layout, _ in made], values))
    return found


def unlikeliness(sources: Sequence[Errors], spread: Spread) -> float:
    """Return minus the logarithm of the likelihood of errors, but for a constant."""
    total = 0.0
    for source in sources:
        table = [[covariance(a, b, spread) for b in source.layouts] for a in source.layouts]
        lower = np.linalg.cholesky(np.array(table) + spread.noise**2 * np.eye(len(table)))
        whitened = np.linalg.solve(lower, np.array(source.values))
        value = float(whitened @ whitened / 2 + np.log(np.diag(lower)).sum())
        total += value / math.sqrt(len(table))
    return total


def fit_spread(sources: Sequence[Errors]) -> Spread:
    """Return the spread under which errors are likeliest."""
    return search(SPREAD, SPREAD_BOUNDS, lambda tried: unlikeliness(sources, tried))


def written(found: Rates | Spread) -> dict[str, float]:
    """Return numbers as a file has them."""
    names = BOUNDS if isinstance(found, Rates) else SPREAD_BOUNDS
    return {name: float(f"{value:.4g}") for name, value in asdict(found).items() if name in names}


def _without(source: str) -> dict[str, float]:
    others = [run for run in timed(read_runs()[0]) if run.source != source]
    return written(fit(thinned(others), START))


def _spread_without(errors: Sequence[Errors], source: str, sources: Sequence[str]) -> Spread:
    others = [each for each, name in zip(errors, sources, strict=True) if name != source]
    return fit_spread(others)


def thinned(runs: Sequence[Run]) -> list[Run]:
    """Return at most ``MOST_RUNS`` of each source."""
    found = []
    for source in sorted({run.source for run in runs}):
        members = [run for run in runs if run.source == source]
        found += members[:: math.ceil(len(members) / MOST_RUNS)]
    return found


def left_out() -> tuple[dict[str, Rates], dict[str, Spread]]:
    """Return, for each source of the repository's rows, rates and spread that never saw it."""
    table: Any = yaml.safe_load(LEFT_OUT.read_text(encoding="utf-8"))
    rates = {source: Rates(**found["rates"]) for source, found in table.items()}
    return rates, {source: Spread(**found["spread"]) for source, found in table.items()}


def main() -> None:
    runs = thinned(list(timed(read_runs()[0])))
    sources = sorted({run.source for run in runs})
    if "--spread" in sys.argv:
        unseen = {source: written(each) for source, each in left_out()[0].items()}
    else:
        rates = fit(runs, START)
        print(f"all sources: {loss(runs, rates):.3f}", written(rates))
        head = "# Written by `python -m tests.planner.fit`; see Rates for what each is.\n"
        DATA.write_text(head + yaml.safe_dump(written(rates), sort_keys=False), encoding="utf-8")
        if "--leave-out" not in sys.argv:
            return
        with ProcessPoolExecutor(2) as pool:
            unseen = dict(zip(sources, pool.map(_without, sources), strict=True))
    errors = errors_of(runs, {source: Rates(**each) for source, each in unseen.items()})
    spread = written(fit_spread(errors))
    print("all sources:", spread)
    head = "# Written by `python -m tests.planner.fit`; see Spread for what each is.\n"
    SPREAD_DATA.write_text(head + yaml.safe_dump(spread, sort_keys=False), encoding="utf-8")
    found = {
        source: {
            "rates": unseen[source],
            "spread": written(_spread_without(errors, source, sources)),
        }
        for source in sources
    }
    head = (
        "# Written by `python -m tests.planner.fit --leave-out`: rates, and the spread of their\n"
        "# errors, that never saw the source.\n"
    )
    LEFT_OUT.write_text(head + yaml.safe_dump(found, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main()
