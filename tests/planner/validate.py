"""Holds the planner's predictions against published runs.

    python -m tests.planner.validate [--rows FILE] [--predict FILE] [--json]
    python -m tests.planner.validate --calculon FOLDER

Without ``--predict``, each source of the rows is predicted with rates that were fitted to the other
sources (``left_out.yaml``). With it, the rows of another file are predicted too: ``predicted`` with
rates that never saw their source, ``calibrated`` again after two measured layouts of each cluster,
which are then left out of the figures (``boltmesh/planner/calibration.py``). A row that cannot be
read as a run is skipped, and the reasons are counted; with ``--json`` they go to stderr. Errors are
|log(predicted / measured)|, fractions of 1.

``--calculon`` puts Calculon beside the left-out predictions, on the rows that it can do. FOLDER is
a clone of https://github.com/calculon-ai/calculon, which no package index has. Memory is compared
with the estimates of accelerate and, where it is installed, of DeepSpeed.
"""

import argparse
import csv
import json
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from boltmesh.planner.calibration import Correction, Spread, default_spread
from boltmesh.planner.layout_memory import estimate_layout_memory
from boltmesh.planner.rates import DATA, Rates, default_rates
from tests.planner.calibration import to_measure
from tests.planner.fit import BOUNDS, described_by, left_out, predict
from tests.planner.rows import ROWS, Run, read_runs, timed

SETS = ("left_out", "predicted", "calibrated")
"""What the figures are of; the keys of the JSON."""
FULL = 1.07
"""Of a device's memory; above, a layout is rejected."""
APART = 1.05
"""Pairs of layouts whose times differ by less are not ordered."""
NUM_MEASURED = 2
"""Layouts of each cluster that are measured for ``calibrated``."""
RatesOf = Callable[[Run], Rates]


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


@dataclass(frozen=True)
class Calibrated:
    """Predictions after some layouts of each cluster were measured."""

    predictions: list[Prediction]
    """Of all other runs."""
    num_unmeasured: int
    """Those of clusters with fewer than three runs, in which nothing was measured."""
    others: list[Prediction]
    """Those that are no further run of a measured layout."""


def calibrate(
    runs: Sequence[Run], rates_of: RatesOf, spread_of: Callable[[Run], Spread]
) -> Calibrated:
    """Predict runs after two measured layouts of each cluster.

    Which two is chosen without their times: those that leave least unknown of the others. Errors
    of a stack on several accelerators are corrected together.
    """
    stacks = defaultdict(list)
    for run in runs:
        stacks[run.source].append(run)
    found, others, num_unmeasured = [], [], 0
    for members in stacks.values():
        spread = spread_of(members[0])
        known = {run.id: described_by(run, rates_of(run)) for run in members}
        clusters = defaultdict(list)
        for run in members:
            clusters[run.cluster_key].append(run)
        chosen: list[Run] = []
        for cluster in clusters.values():
            if len(cluster) < NUM_MEASURED + 1:
                num_unmeasured += len(cluster)
                continue
            layouts = [known[run.id][0] for run in cluster]
            names = [(run.model, run.layout) for run in cluster]
            picked = to_measure(layouts, names, spread, count=NUM_MEASURED)
            chosen += [cluster[at] for at in picked]
        measured = [
            (layout, (run.seconds or 0.0) / seconds)
            for run in chosen
            for layout, seconds in [known[run.id]]
        ]
        rest = [run for run in members if run not in chosen]
        correction = Correction(measured, spread)
        seen = {(run.cluster_key, run.model, run.layout) for run in chosen}
        for run in rest:
            layout, seconds = known[run.id]
            found.append(Prediction(run, correction.factor(layout) * seconds))
            if (run.cluster_key, run.model, run.layout) not in seen:
                others.append(found[-1])
    return Calibrated(found, num_unmeasured, others)


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
    unseen, spreads = left_out()
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
        calibrated = calibrate(
            measured, cold, lambda run: spreads.get(run.source, default_spread())
        )
        result["calibrated"] = summary(calibrated.predictions, memory, reasons.total())
        result["of_calibrated"] = {
            "unmeasured": calibrated.num_unmeasured,
            "others": len(calibrated.others),
            "others_median": _median([each.error for each in calibrated.others]),
        }
        result["reasons"] = dict(reasons.most_common())
    return result


def at_bound(rates: Rates) -> list[str]:
    """Return the rates that the runs do not identify: the fit left them at a bound."""
    return [
        name
        for name, bounds in BOUNDS.items()
        if any(math.isclose(getattr(rates, name), bound, rel_tol=1e-3) for bound in bounds)
    ]


SYSTEMS = {"a100-80gb": "a100_80g", "h100-80gb": "h100_80g_nvl8"}
"""Machines of Calculon by our name."""
AGAIN = {"none": "none", "selective": "attn_only", "full": "full"}


def beside_calculon(found: Sequence[Prediction], folder: Path) -> list[str]:
    """Return the errors of Calculon and of the planner on the rows that Calculon can do.

    Those are dense GPT with plain attention on A100 or H100, without FSDP, context axis or offload.
    """
    sys.path.insert(0, str(folder))
    both = defaultdict(list)
    for each in found:
        seconds = _calculon_seconds(each.run, folder)
        if seconds is not None:
            assert each.run.seconds is not None
            error = abs(math.log(seconds / each.run.seconds))
            both[each.run.source].append((error, each.error))
    lines = ["", "on the rows that Calculon can do, medians:"]
    both["all"] = [each for errors in both.values() for each in errors]
    for source, errors in both.items():
        theirs, ours = (_percent(_median(each)) for each in zip(*errors, strict=True))
        lines.append(f"  {source:42} {len(errors):4}  Calculon {theirs:>7}  boltmesh {ours:>7}")
    return lines


INSTALL = {
    "accelerate": "pip install accelerate",
    "deepspeed": "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed",
}


def memory_peers(runs: Iterable[Run]) -> list[str]:
    """Return the memory errors of the estimates of accelerate and DeepSpeed, and the planner's.

    Accelerate's knows one device and no layout, DeepSpeed's ZeRO alone; neither has activations.
    """
    known = [run for run in runs if run.memory_gb is not None and not run.is_out_of_memory]
    plain = [run for run in known if run.layout.tensor == run.layout.pipeline == 1]
    zero = [run for run in plain if run.layout.zero in {2, 3} and run.layout.shard is None]
    lines = ["", "memory, median factor by which estimates are off:"]
    peers: list[tuple[str, list[Run], Callable[[Run], float]]] = [
        ("accelerate", known, _accelerate_bytes),
        ("deepspeed", zero, _deepspeed_bytes),
    ]
    for name, rows, estimate in peers:
        try:
            found = [(estimate(run), run.memory_gb or 0.0) for run in rows]
        except ImportError:
            lines.append(f"  {name:12} was not run: it is not installed. {INSTALL[name]}")
            continue
        theirs = math.exp(_median([abs(math.log(a / (b * 2**30))) for a, b in found]) or 0.0)
        ours = math.exp(_median(memory_errors(rows)) or 0.0)
        lines.append(f"  {name:12} {len(rows):4} rows  {theirs:6.2f}  boltmesh {ours:5.2f}")
    return lines


def _accelerate_bytes(run: Run) -> float:
    from accelerate.commands.estimate import (  # type: ignore[import-untyped]
        estimate_training_usage,
    )

    return float(max(estimate_training_usage(4 * run.model.numel, "bfloat16").values()))


def _deepspeed_bytes(run: Run) -> float:
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    model, cluster = run.model, run.cluster
    sizes = {"num_gpus_per_node": cluster.devices_per_node, "num_nodes": cluster.num_nodes}
    is_offloaded = run.layout.offload != "none"
    if run.layout.zero == 2:
        found = stage_1_and_2.estimate_zero2_model_states_mem_needs(
            model.numel, **sizes, cpu_offload=is_offloaded
        )
    else:
        found = stage3.estimate_zero3_model_states_mem_needs(
            model.numel,
            model.vocab * model.hidden,
            **sizes,
            cpu_offload=is_offloaded,
            cpu_offload_params=run.layout.offload == "all",
        )
    return float(found[1])


def _calculon_seconds(run: Run, folder: Path) -> float | None:
    """Return Calculon's time of a step; None for what it cannot describe."""
    from calculon import System  # type: ignore[import-not-found]
    from calculon.llm.llm import Llm  # type: ignore[import-not-found]

    model, layout, cluster = run.model, run.layout, run.cluster
    name = SYSTEMS.get(cluster.accelerator.name)
    is_plain = model.kv_heads == model.heads and not (model.is_gated or model.experts)
    is_known = layout.zero < 2 and layout.context == 1 and layout.recompute in AGAIN
    if name is None or not is_plain or not is_known or layout.offload != "none":
        return None
    log = logging.getLogger("calculon")
    per_node, inner = cluster.devices_per_node, layout.tensor * layout.data
    execution = {
        "num_procs": cluster.num_devices,
        "tensor_par": layout.tensor,
        "pipeline_par": layout.pipeline,
        "data_par": layout.data,
        "tensor_par_net": 0,
        "pipeline_par_net": int(cluster.num_devices > per_node),
        "data_par_net": int(inner > per_node),
        "batch_size": layout.sequences,
        "microbatch_size": layout.microbatch,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": AGAIN[layout.recompute],
        "pipeline_interleaving": layout.stages_per_rank,
        "optimizer_sharding": layout.data > 1 and layout.zero == 1,
        "tensor_par_comm_type": "rs_ag" if layout.has_sequence_parallel else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": layout.has_sequence_parallel and layout.recompute != "full",
        "data_par_overlap": layout.data > 1 and layout.has_overlap,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
    application = {
        "name": run.id,
        "hidden": model.hidden,
        "feedforward": model.ffn,
        "seq_size": model.seq,
        "attn_heads": model.heads,
        "attn_size": model.hidden // model.heads,
        "num_blocks": model.layers,
    }
    try:
        system = System(json.loads((folder / "systems" / f"{name}.json").read_text()))
        found = Llm(Llm.Application(application), log)
        found.compile(system, Llm.Execution.from_json(execution))
        found.run(system)
        return float(found.get_total_time())
    except (Llm.Error, AssertionError):
        return None


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
    if (beside := result.get("of_calibrated")) is not None:
        lines.append(
            f"  without further runs of the measured layouts: {beside['others']} rows, median "
            f"{_percent(beside['others_median'])}; {beside['unmeasured']} rows are of clusters "
            f"with fewer than three, in which nothing was measured"
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
    parser.add_argument("--calculon", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        result = validate(given.rows, given.predict)
    except (OSError, csv.Error) as error:
        parser.error(str(error))
    if not given.json:
        print("\n".join(table(result)))
        if given.calculon is not None:
            unseen, _ = left_out()
            known = [run for run in timed(read_runs(given.rows)[0]) if run.source in unseen]
            found = predictions(known, lambda run: unseen[run.source])
            print("\n".join(beside_calculon(found, given.calculon)))
        print("\n".join(memory_peers(read_runs(given.rows)[0])))
        return
    for reason, count in result.get("reasons", {}).items():
        print(f"skipped {count}: {reason}", file=sys.stderr)
    parts = {name: result[name] for name in SETS if name in result}
    print(json.dumps(parts, indent=1, allow_nan=False))


if __name__ == "__main__":
    main()
