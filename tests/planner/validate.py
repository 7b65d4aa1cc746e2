"""Holds the planner's predictions against published runs.

    python -m tests.planner.validate [--rows FILE] [--predict FILE] [--json]

Without ``--predict``, each source of the rows is predicted with rates that were fitted to the other
sources (``left_out.yaml``). With it, the rows of another file are predicted too: ``predicted`` with
rates that never saw their source, ``calibrated`` again after two measured layouts of each cluster,
which are then left out of the figures. A row that cannot be read as a run is skipped, and the
reasons are counted; with ``--json`` they go to stderr. Errors are |log(predicted / measured)|,
fractions of 1.
"""

import argparse
import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import yaml  # type: ignore[import-untyped]

from boltmesh.planner.layout_memory import estimate_layout_memory
from boltmesh.planner.rates import DATA, Rates, default_rates
from boltmesh.planner.step_time import StepTimeModel
from tests.planner.fit import BOUNDS, LEFT_OUT, predict
from tests.planner.rows import ROWS, Run, read_runs, timed

SETS = ("left_out", "predicted", "calibrated")
"""What the figures are of; the keys of the JSON."""
FULL = 1.07
"""Of a device's memory; above, a layout is rejected."""
APART = 1.05
"""Pairs of layouts whose times differ by less are not ordered."""
SCATTER = 1.0
"""Variance of errors within a cluster over that between clusters: about equal, cold."""
RatesOf = Callable[[Run], Rates]


def left_out_rates() -> dict[str, Rates]:
    """Return, for each source of the repository's rows, rates that never saw it."""
    table = yaml.safe_load(LEFT_OUT.read_text(encoding="utf-8"))
    return {source: Rates(**rates) for source, rates in table.items()}


@dataclass(frozen=True)
class Prediction:
    """One run with what was predicted of it."""

    run: Run
    seconds: float

    @property
    def error(self) -> float:
        assert self.run.seconds is not None
        return abs(math.log(self.seconds / self.run.seconds))


def predictions(runs: Iterable[Run], rates_of: RatesOf) -> list[Prediction]:
    return [Prediction(run, predict(run, rates_of(run))) for run in runs]


def summary(found: Sequence[Prediction], memory: Sequence[float], skipped: int) -> dict[str, Any]:
    """Return the figures of the issue for one set of predictions."""
    errors = [each.error for each in found]
    by_source = defaultdict(list)
    for each in found:
        by_source[each.run.source].append(each.error)
    pairs, top1, top3 = ordering(found)
    return {
        "rows": len(found),
        "skipped": skipped,
        "median": _median(errors),
        "p90": _percentile(errors, 0.9),
        "pairs": pairs,
        "top1_loss": top1,
        "top3_loss": top3,
        "memory_median": _median(memory),
        "sources": {
            source: {
                "rows": len(each), "median": _median(each), "p90": _percentile(each, 0.9)
            }
            for source, each in sorted(by_source.items())
        },
    }  # fmt: skip


def ordering(found: Sequence[Prediction]) -> tuple[float | None, float | None, float | None]:
    """Return the share of pairs ordered rightly, and the mean loss of the best one and three.

    Compared are layouts of the same model, devices and batch; groups of at least four count for
    the losses. The loss is how much longer the best of the picked takes than the best there is.
    """
    groups = defaultdict(list)
    for each in found:
        groups[each.run.group_key].append(each)
    right = total = 0
    losses1, losses3 = [], []
    for group in groups.values():
        for one, other in combinations(group, 2):
            if one.run.layout == other.run.layout:
                continue
            assert one.run.seconds is not None
            assert other.run.seconds is not None
            if max(one.run.seconds, other.run.seconds) < APART * min(
                one.run.seconds, other.run.seconds
            ):
                continue
            total += 1
            right += (one.seconds < other.seconds) == (one.run.seconds < other.run.seconds)
        if len({each.run.layout for each in group}) >= 4:
            picked = sorted(group, key=lambda each: each.seconds)
            times = [each.run.seconds or math.inf for each in picked]
            losses1.append(times[0] / min(times) - 1)
            losses3.append(min(times[:3]) / min(times) - 1)
    return (
        right / total if total else None,
        sum(losses1) / len(losses1) if losses1 else None,
        sum(losses3) / len(losses3) if losses3 else None,
    )


def calibrate(runs: Sequence[Run], rates_of: RatesOf) -> tuple[RatesOf, set[str]]:
    """Return rates after two measured layouts of each cluster, and the ids of those runs.

    The two are those whose shares of time by term are nearest to all others of the cluster, as
    predicted. Their ratio of measured over predicted time is the factor on the others, drawn to 1
    as the error of a cold prediction and the scatter within a cluster ask for.
    """
    clusters = defaultdict(list)
    for run in runs:
        clusters[run.cluster_key].append(run)
    factors: dict[tuple[str, str], float] = {}
    used: set[str] = set()
    for key, members in clusters.items():
        if len(members) < 3:
            continue
        chosen = representatives(members, rates_of)
        ratios = [(run.seconds or 0.0) / predict(run, rates_of(run)) for run in chosen]
        weight = len(ratios) / (len(ratios) + SCATTER)
        factors[key] = math.exp(weight * sum(map(math.log, ratios)) / len(ratios))
        used |= {run.id for run in chosen}

    def calibrated(run: Run) -> Rates:
        rates = rates_of(run)
        return replace(rates, calibration=rates.calibration * factors.get(run.cluster_key, 1.0))

    return calibrated, used


def representatives(members: Sequence[Run], rates_of: RatesOf) -> list[Run]:
    """Return two runs with different layouts that represent the others, chosen without their times.

    They are the medoids of the shares of time by term, found one after the other.
    """
    shares = []
    for run in members:
        time = StepTimeModel(run.model, run.cluster, rates_of(run)).predict(run.layout)
        shares.append([value / time.seconds for value in time.terms().values()])
    nearest = [math.inf] * len(members)
    chosen: list[Run] = []
    for _ in range(2):
        best: tuple[float, int, list[float]] | None = None
        for place, run in enumerate(members):
            if any((run.model, run.layout) == (other.model, other.layout) for other in chosen):
                continue
            to_others = [
                min(before, math.dist(shares[place], other))
                for before, other in zip(nearest, shares, strict=True)
            ]
            if best is None or sum(to_others) < best[0]:
                best = sum(to_others), place, to_others
        if best is not None:
            chosen.append(members[best[1]])
            nearest = best[2]
    return chosen


def memory_errors(runs: Iterable[Run]) -> list[float]:
    """Return the relative error of the memory of each run that states it."""
    return [
        abs(
            math.log(estimate_layout_memory(run.model, run.layout).device / (run.memory_gb * 2**30))
        )
        for run in runs
        if run.memory_gb is not None and not run.is_out_of_memory
    ]


def filter_counts(runs: Iterable[Run]) -> dict[str, int]:
    """Return how many runs the memory filter rejects, of those that failed and that fitted."""
    found = {"failed": 0, "failed_rejected": 0, "fitted": 0, "fitted_rejected": 0}
    for run in runs:
        if not run.is_known:
            continue
        needed = estimate_layout_memory(run.model, run.layout).device
        name = "failed" if run.is_out_of_memory else "fitted"
        found[name] += 1
        found[f"{name}_rejected"] += needed > FULL * run.cluster.accelerator.memory_bytes
    return found


def validate(rows: Path, predicted: Path | None) -> dict[str, Any]:
    """Return all figures; see the module."""
    unseen = left_out_rates()
    runs, reasons = read_runs(rows)
    known = [run for run in timed(runs, reasons) if run.source in unseen]
    result: dict[str, Any] = {
        "left_out": summary(
            predictions(known, lambda run: unseen[run.source]), memory_errors(runs), reasons.total()
        ),
        "memory_filter": filter_counts(runs),
        "at_bound": at_bound(default_rates()),
    }
    if predicted is not None:
        runs, reasons = read_runs(predicted)
        measured = timed(runs, reasons)

        def cold(run: Run) -> Rates:
            return unseen.get(run.source, default_rates())

        memory = memory_errors(runs)
        result["predicted"] = summary(predictions(measured, cold), memory, reasons.total())
        calibrated, used = calibrate(measured, cold)
        rest = [run for run in measured if run.id not in used]
        result["calibrated"] = summary(predictions(rest, calibrated), memory, reasons.total())
        result["reasons"] = dict(reasons.most_common())
    return result


def at_bound(rates: Rates) -> list[str]:
    """Return the rates that the runs do not identify: the fit left them at a bound."""
    return [
        name
        for name, bounds in BOUNDS.items()
        if any(math.isclose(getattr(rates, name), bound, rel_tol=1e-3) for bound in bounds)
    ]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _percentile(values: Sequence[float], share: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def table(result: dict[str, Any]) -> list[str]:
    """Return the figures as lines."""
    lines = [f"rates of {DATA.name}; not identified, at a bound: {', '.join(result['at_bound'])}"]
    for name in SETS:
        if name not in result:
            continue
        found = result[name]
        lines += ["", f"{name}: {found['rows']} rows, {found['skipped']} skipped"]
        for source, each in found["sources"].items():
            lines.append(
                f"  {source:42} {each['rows']:4}  median {_percent(each['median']):>7}"
                f"  90th percentile {_percent(each['p90']):>7}"
            )
        lines.append(
            f"  {'all':42} {found['rows']:4}  median {_percent(found['median']):>7}"
            f"  90th percentile {_percent(found['p90']):>7}"
        )
        lines.append(
            f"  pairs ordered {_percent(found['pairs'])}, loss of the first "
            f"{_percent(found['top1_loss'])}, of the first three {_percent(found['top3_loss'])}, "
            f"memory {_percent(found['memory_median'])}"
        )
    for reason, count in result.get("reasons", {}).items():
        lines.append(f"  skipped {count:4}: {reason}")
    counts = result["memory_filter"]
    lines += [
        "",
        (
            f"memory filter: {counts['failed_rejected']} of {counts['failed']} that failed "
            f"rejected, {counts['fitted_rejected']} of {counts['fitted']} that fitted"
        ),
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        result = validate(given.rows, given.predict)
    except (OSError, csv.Error) as error:
        parser.error(str(error))
    if not given.json:
        print("\n".join(table(result)))
        return
    for reason, count in result.get("reasons", {}).items():
        print(f"skipped {count}: {reason}", file=sys.stderr)
    parts = {name: result[name] for name in SETS if name in result}
    print(json.dumps(parts, indent=1, allow_nan=False))


if __name__ == "__main__":
    main()
