"""The errors of the planner on published runs, a little looser than they were measured."""

import csv
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from boltmesh.planner.calibration import Correction, PredictedLayout, Spread, default_spread
from boltmesh.planner.rates import default_rates
from boltmesh.planner.step_time import StepTimeModel
from tests.planner.calibration import to_measure
from tests.planner.fit import SPREAD_BOUNDS
from tests.planner.rows import ROWS, read_runs, timed
from tests.planner.validate import validate


@pytest.fixture(scope="module")
def result():
    return validate(ROWS, ROWS)


def test_times_of_sources_that_the_rates_never_saw(result):
    found = result["left_out"]
    assert found["rows"] == 456
    assert found["median"] < 0.09
    assert found["p90"] < 0.19
    medians = {name: each["median"] for name, each in found["sources"].items()}
    assert max(medians.values()) < 0.21


def test_layouts_are_ordered(result):
    found = result["left_out"]
    assert found["pairs"] > 0.84
    assert found["top3_loss"] < 0.02


def test_times_after_two_measured_layouts_of_each_cluster(result):
    found, cold = result["calibrated"], result["left_out"]
    clusters = {(each.source, each.gpu) for each in timed(read_runs(ROWS)[0])}
    assert found["rows"] == cold["rows"] - 2 * len(clusters) == 430
    assert found["median"] < 0.045
    assert found["p90"] < 0.16
    assert found["pairs"] > 0.85
    beside = result["of_calibrated"]
    assert beside["unmeasured"] == 0
    assert beside["others"] == 407
    assert beside["others_median"] < 0.045
    mean = {
        name: statistics.mean(each["median"] for each in result[name]["sources"].values())
        for name in ("left_out", "calibrated")
    }
    assert mean["calibrated"] < 0.06 < 0.09 < mean["left_out"]


SPREAD = Spread(stack=0.3, part=0.4, narrow=0.0, layout=0.0, noise=0.1, octaves=4.0)


def layout(place: str, *shares: float) -> PredictedLayout:
    """Return a layout of equal sizes, none of its products narrow."""
    return PredictedLayout(place, (*shares, 0.0, 0.0), (1.0,), ("bf16",))


def test_a_measured_layout_corrects_others_by_what_they_have_in_common() -> None:
    seen, other = layout("a", 0.0), layout("a", 0.5)
    assert Correction([], SPREAD).factor(seen) == 1.0
    # 0.09 of the variance are common, 0.01 more are noise.
    by_one = Correction([(seen, 2.0)], SPREAD)
    assert by_one.factor(seen) == by_one.factor(other) == pytest.approx(2**0.9)
    assert by_one.factor(layout("b", 0.0)) == pytest.approx(2 ** (0.9 * 0.9))
    both = [(seen, 1.0), (layout("a", 1.0), 2.0)]
    less, more = map(Correction(both, SPREAD).factor, (seen, layout("a", 1.0)))
    # The covariances are 0.10, 0.09, 0.26: the second error is one of its part.
    assert math.log(less) / math.log(2) == pytest.approx(0.09 * 0.01 / (0.1 * 0.26 - 0.0081))
    assert math.log(more) / math.log(2) == pytest.approx(
        (0.25 * 0.1 - 0.09 * 0.09) / (0.1 * 0.26 - 0.0081)
    )


def test_layouts_to_measure_are_those_that_leave_least_unknown() -> None:
    shares = [0.0, 0.0, 0.0, 0.1, 1.0]
    layouts = [layout("a", each) for each in shares]
    assert to_measure(layouts, shares, SPREAD, count=1) == [3]
    assert to_measure(layouts, shares, SPREAD) == [3, 4]
    assert to_measure(layouts[:3], shares[:3], SPREAD) == [0], "one layout is not measured twice"


def test_the_spread_of_errors_is_within_what_was_searched() -> None:
    for name, (low, high) in SPREAD_BOUNDS.items():
        assert low <= getattr(default_spread(), name) <= high


def test_memory(result):
    assert result["left_out"]["memory_median"] < 0.08
    counts = result["memory_filter"]
    assert counts["failed_rejected"] >= 6
    assert counts["fitted_rejected"] <= 0.08 * counts["fitted"]


def test_rates_that_the_runs_do_not_identify_are_named(result):
    assert set(result["at_bound"]) <= {
        "matmul", "elementwise", "network", "onload_network", "straggler"
    }  # fmt: skip


def test_runs_that_no_fit_has_seen_are_predicted() -> None:
    """Of five stacks; published after the rows of the fit were collected, or left out of them."""
    seen, _ = read_runs(ROWS)
    runs, skipped = read_runs(ROWS.with_name("new_rows.csv"))
    assert not skipped
    assert not {each.source for each in runs} & {each.source for each in seen}
    off = [
        StepTimeModel(each.model, each.cluster, default_rates()).predict(each.layout).seconds
        / (each.seconds or 0.0)
        for each in runs
    ]
    assert len(off) == 21
    assert statistics.median(abs(each - 1) for each in off) < 0.1
    assert max(abs(each - 1) for each in off) < 0.3


def test_rows_of_another_file_are_predicted(tmp_path: Path):
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    unseen = [{**row, "source": "another source"} for row in rows if "torchtitan" in row["source"]]
    unseen.append({**unseen[0], "gpu": "abacus"})
    target = tmp_path / "rows.csv"
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, unseen[0].keys())
        writer.writeheader()
        writer.writerows(unseen)
    command = [sys.executable, "-m", "tests.planner.validate", "--predict", str(target), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert list(found) == ["left_out", "predicted", "calibrated"]
    assert list(found["predicted"]) == [
        "rows", "skipped", "median", "p90", "pairs", "top1_loss", "top3_loss", "memory_median",
        "sources",
    ]  # fmt: skip
    assert "skipped 1: gpu is not in the table" in done.stderr
    assert found["predicted"]["rows"] == 18
    assert found["predicted"]["skipped"] == 1
    assert list(found["predicted"]["sources"]) == ["another source"]
    assert found["calibrated"]["rows"] == 16
    assert found["calibrated"]["median"] < found["predicted"]["median"] + 0.05


GOOD = {
    "source": "another source", "gpu": "NVIDIA H100 80GB HBM3", "n_gpus": "64", "layers": "32",
    "hidden": "4096", "heads": "32", "vocab": "128,256", "seq": "8192", "tp": "4", "pp": "2",
    "mbs": "1", "gbs": "128.0", "iter_s": "4.5",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "abacus"}, "gpu is not in the table"),
        ({"gpu": ""}, "gpu is empty"),
        ({"layers": "nan"}, "layers is empty"),
        ({"hidden": "-4096"}, "hidden is no whole number of 1 or more"),
        ({"seq": "inf"}, "seq is no whole number of 1 or more"),
        ({"heads": "0"}, "heads is no whole number of 1 or more"),
        ({"tp": "3"}, "tp x pp x cp does not divide n_gpus"),
        ({"pp": "16", "layers": "8"}, "pp is more than layers"),
        ({"gbs": "4"}, "gbs is less than the replicas"),
        ({"zero": "4"}, "zero is none of 0, 1, 2, 3, hsdp"),
        ({"ep": "8"}, "a mixture, and rows state no sizes of experts"),
        ({"iter_s": ""}, "no time that can be read as seconds of a step"),
        ({"status": "OOM"}, "ran out of memory"),
    ],
    ids=str,
)
def test_rows_that_are_no_runs_are_skipped_with_a_reason(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    found = _predicted(tmp_path, [GOOD, {**GOOD, **change}])
    assert found["predicted"]["rows"] == 1
    assert found["predicted"]["skipped"] == 1
    assert found["reasons"] == {reason: 1}


def test_columns_may_be_missing_more_or_in_another_order(tmp_path: Path) -> None:
    turned = {"colour": "blue", **dict(reversed(GOOD.items()))}
    found = _predicted(tmp_path, [turned])
    same = _predicted(tmp_path, [{**GOOD, "vpp": "0", "cp": "", "flash": "yes", "zero": "ZeRO-0"}])
    assert found["predicted"]["rows"] == found["calibrated"]["rows"] == 1
    assert found["predicted"] == same["predicted"]


def test_figures_of_a_file_without_a_run_are_empty(tmp_path: Path) -> None:
    found = _predicted(tmp_path, [{"gpu": "H100"}])
    assert found["predicted"]["rows"] == 0
    assert found["predicted"]["median"] is None


def _predicted(folder: Path, rows: list[dict[str, str]]) -> dict[str, Any]:
    target = folder / "rows.csv"
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, sorted({key for row in rows for key in row}, reverse=True))
        writer.writeheader()
        writer.writerows(rows)
    return validate(ROWS, target)
